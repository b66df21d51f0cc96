"""Loggers whose failures end no training: each is told once, and counted."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distaccum.config.secrets import redact_text, values_of_environment
from distaccum.distributed.random import RNGState
from distaccum.train.metrics.loggers import Logger, Record, RunInfo

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)


class Tolerant(Logger):
    """A logger that raises nothing: the first failure is a warning, and :meth:`close` says how many there were.

    Args:
        name: in the messages.
        make: makes the logger, when the run begins; one that cannot be made, or begin, is not called again.
        draws_on: the device of a training whose random numbers are left as they were, whatever the logger draws; None
            for one that draws none, or that is called by another thread than the training's.
    """

    def __init__(self, name: str, make: Callable[[], Logger], *, draws_on: torch.device | None = None) -> None:
        self._name, self._make, self._logger, self._draws_on = name, make, Logger(), draws_on
        self.failures = 0
        """Calls that raised."""

    def begin(self, run: RunInfo) -> None:
        """Makes the logger."""
        self._try(self._begin, run)

    def log(self, record: Record) -> None:
        """Gives the logger a copy of its own."""
        self._try(self._logger.log, dict(record))

    def sync(self) -> None:
        """Asks the logger."""
        self._try(self._logger.sync)

    def alert(self, title: str, text: str) -> None:
        """Passes it on."""
        self._try(self._logger.alert, title, text)

    def checkpoint(self, path: Path, *, step: int, best: bool) -> None:
        """Passes it on."""
        self._try(self._logger.checkpoint, path, step=step, best=best)

    def mark_preempted(self) -> None:
        """Passes it on."""
        self._try(self._logger.mark_preempted)

    def close(self, *, failed: bool) -> None:
        """Closes the logger, and tells how often it failed, if more than once."""
        self._try(self._logger.close, failed=failed)
        if self.failures > 1:
            _log.warning("logger %s: %d of its calls failed; metrics.jsonl has every record", self._name, self.failures)

    def _begin(self, run: RunInfo) -> None:
        logger = self._make()
        logger.begin(run)
        self._logger = logger

    def _try(self, method: Callable[..., None], *positional: Any, **named: Any) -> None:
        generators = None if self._draws_on is None else RNGState.capture(self._draws_on)
        try:
            method(*positional, **named)
        except Exception as error:  # whatever fails in there is no reason to lose a training run
            self.failures += 1
            if self.failures == 1:
                first_line = str(error).strip().partition("\n")[0]
                said = redact_text(f"{type(error).__name__}: {first_line}", values_of_environment())
                call = getattr(method, "__name__", "a call").lstrip("_")
                goes_on = "the run goes on" if call != "begin" else "the run goes on without it"
                text = "logger %s: %s (in %s); %s, and metrics.jsonl has every record"
                _log.warning(text, self._name, said, call, goes_on)
        finally:
            if generators is not None:
                generators.restore()
