"""Ends an agent that has stopped turning: its store's machine may be gone without a word, and no answer will come."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Thread

STALL_S = 60


class StallGuard:
    """Calls ``ended`` from a thread of its own once :meth:`turn` has not been called for ``STALL_S`` seconds.

    It counts seconds that it has slept itself, so that the time in which the whole agent is stopped is none.
    """

    def __init__(self, ended: Callable[[], object]) -> None:
        self._ended, self._turns, self._closed = ended, 0, Event()
        self._thread = Thread(target=self._watch, name="stall", daemon=True)
        self._thread.start()

    def turn(self) -> None:
        """The agent is at work."""
        self._turns += 1

    def close(self) -> None:
        """Stops watching."""
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        seen = slept = 0
        while not self._closed.wait(1):
            seen, slept = self._turns, 0 if self._turns != seen else slept + 1
            if slept >= STALL_S:
                self._ended()
                return
