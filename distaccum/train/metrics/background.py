"""A logger in a thread of its own, so that training never waits for what it talks to."""

from __future__ import annotations

import logging
import os
import queue
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from shutil import rmtree
from threading import Event, Thread
from threading import enumerate as enumerate_threads
from typing import TYPE_CHECKING, Any

from distaccum.config.secrets import redact_text, values_of_environment
from distaccum.distributed.random import RNGState
from distaccum.train.metrics.loggers import Logger, Record, RunInfo

if TYPE_CHECKING:
    import torch

UPLOAD_TIMEOUT_S = 600.0
"""How long a tracker may take for one checkpoint."""

# Checkpoints held for a tracker that is to upload them, beyond their removal from ``checkpoints/``.

_BEST = "best"


class KeptCheckpoints:
    """Hard links of checkpoints below a folder: no byte is copied, and none is lost when the run prunes its own.

    Args:
        folder: on the file system of the checkpoints.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def keep(self, path: Path, *, step: int, best: bool) -> Path:
        """Holds the checkpoint at ``path``; returns where.

        Raises:
            OSError: another file system, or one without hard links.
        """
        kept = self._folder / f"step-{step}"
        partial = self._folder / f".step-{step}"
        if not _is_same(path, kept):  # which may be read at this moment
            rmtree(partial, ignore_errors=True)  # a run died as it was made
            rmtree(kept, ignore_errors=True)  # of a past that the run repeats
            for file, name in files_of(path):
                link = partial / name
                link.parent.mkdir(parents=True, exist_ok=True)
                os.link(file, link)
            partial.rename(kept)
        if best:
            (self._folder / _BEST).write_text(str(step))
        return kept

    def all(self, until: int) -> Iterator[tuple[Path, int, bool]]:
        """Those up to a step, by step: where, of which step, and whether it is the best."""
        marker = self._folder / _BEST
        best = marker.read_text() if marker.exists() else ""
        steps = sorted(int(path.name.removeprefix("step-")) for path in self._folder.glob("step-*"))
        for step in steps:
            if step <= until:
                yield self._folder / f"step-{step}", step, str(step) == best

    def drop(self) -> None:
        """Removes them all."""
        rmtree(self._folder, ignore_errors=True)


def _is_same(path: Path, kept: Path) -> bool:
    try:
        return all(file.samefile(kept / name) for file, name in files_of(path))
    except OSError:
        return False


def files_of(kept: Path) -> Iterator[tuple[Path, str]]:
    """Each file of a checkpoint, and its name in it."""
    for file in sorted(kept.rglob("*")):
        if file.is_file():
            yield file, file.relative_to(kept).as_posix()


# Loggers whose failures end no training: each is told once, and counted.

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


_LEAVING_S = 8.0
_SUFFIX = " (logger)"  # of the threads' names


class InThread(Logger):
    """Hands every call over, and returns at once; :meth:`close` waits for the thread, as long as it gets on.

    What the logger raises is told once, and it is not called again.

    Args:
        name: in the messages.
        logger: is called in the thread alone.
        timeout_s: without any progress, after which the thread is left behind.
        opening_s: the same, where not even :meth:`Logger.begin` has returned.
        remedy: for the message then.
        kept: holds the checkpoints until the logger has had them.
        log_checkpoints: which it is told of: ``none``, ``best`` or ``all``.
        reads_later: what it is told of a checkpoint it reads later: it drops the files itself.
        awaited_s: for which :meth:`begin` waits until the logger has begun.
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
        reads_later: bool = False,
        awaited_s: float = 0.0,
    ) -> None:
        self._name, self._logger, self._remedy = name, logger, remedy
        self._timeout, self._opening = timeout_s, opening_s
        self._kept, self._log_checkpoints, self._reads_later = kept, log_checkpoints, reads_later
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.later: Callable[[Callable[[], None]], None] = self._calls.put
        """Has a function called in the thread."""
        self._begun, self._awaited = Event(), awaited_s
        self._done, self._ended = 0, Event()
        Thread(target=self._work, name=f"{name}{_SUFFIX}", daemon=True).start()

    def begin(self, run: RunInfo) -> None:
        """Hands it over, and the checkpoints that an earlier process had no time for."""
        self._calls.put(partial(self._logger.begin, run))
        self._calls.put(self._begun.set)
        for kept, step, best in self._kept.all(until=run.step):
            self._calls.put(partial(self._tell, kept, step, best=best))
        self._begun.wait(self._awaited)

    def log(self, record: Record) -> None:
        """Hands a copy over."""
        self._calls.put(partial(self._logger.log, dict(record)))

    def alert(self, title: str, text: str) -> None:
        """Hands it over."""
        self._calls.put(partial(self._logger.alert, title, text))

    def checkpoint(self, path: Path, *, step: int, best: bool) -> None:
        """Hands over links of its files."""
        wanted = self._log_checkpoints == "all" or (self._log_checkpoints == "best" and best)
        if self._ended.is_set() or not wanted:
            return
        try:
            kept = self._kept.keep(path, step=step, best=best)
        except OSError as error:
            text = "%s: the checkpoint of step %d cannot be kept for it (%s); it stays in %s"
            _log.warning(text, self._name, step, error, path.parent)
            return
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
            text = "%s: still busy after %.0f s, and left behind; %s"
            _log.warning(text, self._name, timeout, self._remedy)

    def _tell(self, kept: Path, step: int, *, best: bool) -> None:
        self._logger.checkpoint(kept, step=step, best=best)
        if not self._reads_later:
            rmtree(kept, ignore_errors=True)

    def _work(self) -> None:
        try:
            while (call := self._calls.get()) is not None:
                call()
                self._done += 1
        except Exception as error:  # whatever fails in there is no reason to lose a training run
            _log.warning("%s: %s: %s; %s", self._name, type(error).__name__, error, self._remedy)
            self._begun.set()
            self._ended.set()
            Event().wait()  # W&B's exit handlers would fail too, at length: see is_left_behind
        self._ended.set()


def is_left_behind() -> bool:
    """Whether a logger's thread hung or failed: what it talks to may keep the process from ending."""
    return any(thread.name.endswith(_SUFFIX) for thread in enumerate_threads())
