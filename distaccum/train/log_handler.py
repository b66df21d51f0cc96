"""The log of a command: warnings and errors of every rank on stderr, with ``-v`` what rank 0 does as well."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager


class _Stderr(logging.Handler):
    """Writes to whatever ``sys.stderr`` is at that moment: it is redirected while Hydra composes a job."""

    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(f"{self.format(record)}\n")


@contextmanager
def log_to_stderr(rank: int, *, verbose: bool) -> Iterator[None]:
    """Installs the handler of the package's loggers for the length of the block.

    Only commands do so: a program that uses distaccum as a library decides itself where its log goes.

    Args:
        rank: named in every line but rank 0's.
        verbose: rank 0 logs information too.
    """
    logger, handler = logging.getLogger("distaccum"), _Stderr()
    before = logger.level, logger.propagate
    handler.setFormatter(logging.Formatter(f"distaccum: {f'rank {rank}: ' if rank else ''}%(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO if verbose and rank == 0 else logging.WARNING)
    logger.propagate = False  # Hydra gives the root logger a handler for stdout
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.level, logger.propagate = before


def enable_loggers() -> None:
    """Enables the package's loggers again: Hydra's ``hydra/job_logging=disabled`` disables every logger there is."""
    for name, logger in logging.root.manager.loggerDict.items():
        if name.partition(".")[0] == "distaccum" and isinstance(logger, logging.Logger):
            logger.disabled = False
