"""What rank 0 has open while it is rank 0."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType

from distaccum.train.metrics.loggers import Logger


class Rank0Resources:
    """The loggers of a run, opened once in a process and closed at the end of the block."""

    def __init__(self) -> None:
        self._closing = ExitStack()
        self._loggers: Sequence[Logger] | None = None

    def __enter__(self) -> Rank0Resources:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._closing.__exit__(kind, error, traceback)

    def loggers(self, make: Callable[[], Sequence[Logger]]) -> Sequence[Logger]:
        """Those that are open, or else what ``make`` opens."""
        if self._loggers is None:
            self._loggers = make()
            for logger in self._loggers:
                self._closing.push(partial(_close, logger))
        return self._loggers


def _close(logger: Logger, kind: type[BaseException] | None, *_: object) -> None:
    logger.close(failed=kind is not None)
