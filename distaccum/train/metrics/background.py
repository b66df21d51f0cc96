"""A logger in a thread of its own, so that training never waits for what it talks to."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable
from functools import partial
from pathlib import Path
from shutil import rmtree
from threading import Event, Thread
from threading import enumerate as enumerate_threads

from distaccum.train.metrics.kept import KeptCheckpoints, is_wanted
from distaccum.train.metrics.loggers import Logger, Record, RunInfo

_log = logging.getLogger(__name__)

_LEAVING_S = 8.0
SUFFIX = "-logger"  # of the threads' names


class InThread(Logger):
    """Hands every call over, and returns at once; :meth:`close` waits for the thread, as long as it gets on.

    Args:
        name: in the messages.
        logger: is called in the thread alone, and raises nothing.
        timeout_s: without any progress, after which the thread is left behind.
        opening_s: the same, where not even :meth:`Logger.begin` has returned.
        remedy: for the message then.
        kept: holds the checkpoints until the logger has had them.
        log_checkpoints: which it is told of: ``none``, ``best`` or ``all``.
    """

    def __init__(
        self,
        name: str,
        logger: Logger,
        *,
        timeout_s: float,
        opening_s: float,
        remedy: str,
        kept: KeptCheckpoints,
        log_checkpoints: str,
    ) -> None:
        self._name, self._logger, self._remedy = name, logger, remedy
        self._timeout, self._opening = timeout_s, opening_s
        self._kept, self._log_checkpoints = kept, log_checkpoints
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._done, self._ended = 0, Event()
        Thread(target=self._work, name=f"{name.lower()}{SUFFIX}", daemon=True).start()

    def begin(self, run: RunInfo) -> None:
        """Hands it over, and the checkpoints that an earlier process had no time for."""
        self._calls.put(partial(self._logger.begin, run))
        for kept, step, best in self._kept.all(until=run.step):
            self._calls.put(partial(self._tell, kept, step, best=best))

    def log(self, record: Record) -> None:
        """Hands a copy over."""
        self._calls.put(partial(self._logger.log, dict(record)))

    def alert(self, title: str, text: str) -> None:
        """Hands it over."""
        self._calls.put(partial(self._logger.alert, title, text))

    def checkpoint(self, path: Path, *, step: int, best: bool) -> None:
        """Hands over links of its files.

        Raises:
            OSError: it cannot be linked.
        """
        if is_wanted(self._log_checkpoints, best=best):
            kept = self._kept.keep(path, step=step, best=best)
            self._calls.put(partial(self._tell, kept, step, best=best))

    def mark_preempted(self) -> None:
        """Hands it over; who is told to leave does not wait long."""
        self._timeout = min(self._timeout, _LEAVING_S)
        self._calls.put(self._logger.mark_preempted)

    def close(self, *, failed: bool) -> None:
        """Waits until all is handled, or nothing was for ``timeout_s``."""
        self._calls.put(partial(self._logger.close, failed=failed))
        self._calls.put(None)
        timeout, before = self._timeout if self._done else min(self._timeout, self._opening), self._done
        while not self._ended.wait(timeout) and before < self._done:
            timeout, before = self._timeout, self._done
        if not self._ended.is_set():
            text = "logger %s: still busy after %.0f s, and left behind; %s"
            _log.warning(text, self._name, timeout, self._remedy)

    def _tell(self, kept: Path, step: int, *, best: bool) -> None:
        self._logger.checkpoint(kept, step=step, best=best)
        rmtree(kept, ignore_errors=True)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            self._done += 1
        self._ended.set()


def is_left_behind() -> bool:
    """Whether a logger's thread hung or failed: what it talks to may keep the process from ending."""
    return any(thread.name.endswith(SUFFIX) for thread in enumerate_threads())
