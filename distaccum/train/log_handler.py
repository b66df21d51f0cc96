"""The log of a command: warnings and errors of every rank on stderr, with ``-v`` what rank 0 does as well."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

PACKAGE = logging.getLogger("distaccum")


class _Stderr(logging.Handler):
    """Writes to whatever ``sys.stderr`` is at that moment: it is redirected while Hydra composes a job."""

    def __init__(self, level: int, layout: str) -> None:
        super().__init__(level)
        self.setFormatter(logging.Formatter(layout))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(f"{self.format(record)}\n")
        except Exception:
            self.handleError(record)


@contextmanager
def log_to_stderr(rank: int, *, verbose: bool) -> Iterator[None]:
    """Installs the handlers of the package's loggers, and of all others, for the length of the block.

    Only commands do so: a program that uses distaccum as a library decides itself where its log goes. The loggers let
    information through on every rank, for its log file.

    Args:
        rank: named in every line but rank 0's.
        verbose: rank 0 shows information too.
    """
    level = logging.INFO if verbose and rank == 0 else logging.WARNING
    layouts = {
        PACKAGE: f"distaccum: {f'rank {rank}: ' if rank else ''}%(message)s",
        logging.root: f"{f'[rank {rank}] ' if rank else ''}%(levelname)s %(name)s: %(message)s",
    }
    handlers = {logger: _Stderr(level, layout) for logger, layout in layouts.items()}
    before = {logger: (logger.level, logger.propagate) for logger in layouts}
    for logger, handler in handlers.items():
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    PACKAGE.propagate = False  # Hydra may give the root logger a handler for stdout
    try:
        yield
    finally:
        for logger, handler in handlers.items():
            logger.removeHandler(handler)
            logger.level, logger.propagate = before[logger]


def enable_loggers() -> None:
    """Enables the package's loggers again: Hydra's ``hydra/job_logging=disabled`` disables every logger there is."""
    for name, logger in logging.root.manager.loggerDict.items():
        if name.partition(".")[0] == "distaccum" and isinstance(logger, logging.Logger):
            logger.disabled = False
