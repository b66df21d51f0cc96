"""A log file for each rank, ``logs/rank-N.log`` in the run directory: what any logger, and any warning, says."""

from __future__ import annotations

import io
import logging
import os
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from errno import ESTALE
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from distaccum.config.secrets import redact_text, values_of_environment

# The log of a command: warnings and errors of every rank on stderr, with ``-v`` what rank 0 does as well.

PACKAGE = logging.getLogger("distaccum")


class _Stderr(logging.Handler):
    """Writes to whatever ``sys.stderr`` is at that moment: it is redirected while Hydra composes a job."""

    def __init__(self, level: int, layout: str, *, is_main: bool) -> None:
        super().__init__(level)
        self._is_main = is_main
        self.hide: Callable[[str], str] = hidden
        self.setFormatter(logging.Formatter(layout))

    def emit(self, record: logging.LogRecord) -> None:
        if not self._is_main and hasattr(record, "on_all_ranks"):
            return
        try:
            sys.stderr.write(f"{self.hide(self.format(record))}\n")
        except Exception:
            self.handleError(record)


def hidden(text: str) -> str:
    """A text without the secrets of the environment, and without what is one by its key or form."""
    return redact_text(text, values_of_environment())


def hide_on_stderr(hide: Callable[[str], str]) -> None:
    """From now on ``hide`` takes the secrets out of what a command's log says on stderr."""
    for handler in (*PACKAGE.handlers, *logging.root.handlers):
        if isinstance(handler, _Stderr):
            handler.hide = hide


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
    handlers = {logger: _Stderr(level, layout, is_main=rank == 0) for logger, layout in layouts.items()}
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


MOST_BYTES = 16 * 2**20
"""Of a file; one older file of that size is kept beside it."""
_EARLY = 1000  # records before the run directory is known


class RunLog(logging.Handler):
    """Takes the records of all loggers on this rank for the length of the block, at INFO and above.

    They wait until :meth:`open` says where they go; a run that is refused before leaves no file. What cannot be
    written, as on a full disk, is lost, which one line on standard error says, and the run goes on.

    Nobody's levels are changed: where distaccum is a library, the program's configuration of ``logging`` decides which
    records there are. Those that nobody else takes still get to standard error, as Python has it.

    Args:
        rank: names the file.
        hide: takes the secrets out of a text.
    """

    def __init__(self, rank: int, *, hide: Callable[[str], str] = str) -> None:
        super().__init__(logging.INFO)
        self._rank, self._hide = rank, hide
        self._early: deque[logging.LogRecord] = deque(maxlen=_EARLY)
        self._file: _File | None = None
        self._loggers: list[logging.Logger] = []
        self._show_warning = warnings.showwarning

    def __enter__(self) -> RunLog:
        """Begins to take records."""
        self._loggers = [logging.root]
        if not PACKAGE.propagate:
            self._loggers.append(PACKAGE)
        for logger in self._loggers:
            logger.addHandler(self)
        self._show_warning, self._own = warnings.showwarning, self._note_warning
        warnings.showwarning = self._own
        return self

    def __exit__(self, *_: object) -> None:
        """Gives the loggers back, and closes the file."""
        if warnings.showwarning is self._own:
            warnings.showwarning = self._show_warning
        for logger in self._loggers:
            logger.removeHandler(self)
        self.close()

    def open(self, folder: Path) -> None:
        """Writes to ``rank-N.log`` in ``folder`` from now on, and what has waited; the file is made for its first line.

        A file that is there is continued.
        """
        self._file = _File(folder / f"rank-{self._rank}.log", self._hide)
        while self._early:
            self._file.handle(self._early.popleft())

    def emit(self, record: logging.LogRecord) -> None:
        """Writes one record."""
        if self._file is None:
            self._early.append(record)
        else:
            self._file.handle(record)
        if not _is_taken(record.name, self) and logging.lastResort and record.levelno >= logging.lastResort.level:
            logging.lastResort.handle(record)

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
        super().close()

    def _note_warning(self, message: Warning | str, category: type[Warning], *others: Any, **named: Any) -> None:
        """In place of ``warnings.showwarning``, which it calls as well."""
        if self._file is not None:
            place = dict(zip(("filename", "lineno"), others, strict=False)) | named
            text = f"{place.get('filename')}:{place.get('lineno')}: {category.__name__}: {message}"
            record = {"name": "warnings", "msg": text, "levelno": logging.WARNING, "levelname": "WARNING"}
            self._file.handle(logging.makeLogRecord(record))
        self._show_warning(message, category, *others, **named)


class _File(RotatingFileHandler):
    def __init__(self, path: Path, hide: Callable[[str], str]) -> None:
        super().__init__(path, maxBytes=MOST_BYTES, backupCount=1, encoding="utf-8", errors="replace", delay=True)
        self._hide, self._pid, self._failed, self._anew = hide, os.getpid(), False, False

    def _open(self) -> Any:
        """Without a buffer: what a full disk does not take is not tried again with every later line."""
        path = Path(self.baseFilename)
        path.parent.mkdir(exist_ok=True)
        return io.TextIOWrapper(path.open("ab", buffering=0), encoding="utf-8", errors="replace", write_through=True)

    def shouldRollover(self, record: logging.LogRecord) -> bool:  # noqa: N802  logging's name
        """A process that was forked to load data leaves that to its parent."""
        return os.getpid() == self._pid and bool(super().shouldRollover(record))

    def format(self, record: logging.LogRecord) -> str:
        """ISO time with its zone, level, logger, message, and the traceback where there is one."""
        when = datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")
        return self._hide(f"{when} {record.levelname} {record.name}: {super().format(record)}")

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  logging's name
        """A stale file is opened anew; a disk's error is said once; one in a message is told as Python does it."""
        error = sys.exc_info()[1]
        if getattr(error, "errno", None) == ESTALE and not self._anew:
            with suppress(OSError, AttributeError):
                self.stream.close()  # type: ignore[union-attr]
            self.stream, self._anew = None, True
            self.emit(record)
            self._anew = False
        elif not isinstance(error, OSError):
            super().handleError(record)
        elif not self._failed:
            self._failed = True
            if not Path(self.baseFilename).parent.parent.exists():  # of a machine that does not share the folder, which
                return  # is told where it matters
            problem = f"{self.baseFilename} cannot be written ({error.strerror}), and the run goes on without it"
            with suppress(OSError, ValueError):
                sys.stderr.write(f"distaccum: {problem}\n")

    def close(self) -> None:
        """Closes the file; nothing is left to be written."""
        with suppress(OSError):
            super().close()


def _is_taken(name: str, own: logging.Handler) -> bool:
    """Whether a logger's records get to another handler than ``own``."""
    logger: logging.Logger | None = logging.getLogger(name)
    while logger is not None:
        if any(handler is not own for handler in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False
