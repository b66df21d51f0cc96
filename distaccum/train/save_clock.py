"""Checkpoints by the clock: rank 0 says when one is due, and it travels with the count of a window."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic


class SaveClock:
    """Due so long after the last save, or after the start; all ranks learn of it before the same window.

    See :class:`~distaccum.data.counter.Rider`.

    Args:
        every: seconds.
        decides: whether this rank's clock counts: rank 0's does.
        ago: seconds since the last save.
        now: the clock, in seconds.
    """

    def __init__(self, every: float, *, decides: bool, ago: float = 0.0, now: Callable[[], float] = monotonic) -> None:
        self._every, self._decides, self._now = every, decides, now
        self.saved()
        self._began -= ago

    def saved(self) -> None:
        """Begins to count anew; on all ranks, after any save."""
        self._began, self.due = self._now(), False

    def outgoing(self, micro_batches: int, losses: int) -> list[float]:
        """1.0 from the rank that decides, where a save is due."""
        return [float(self._decides and self._now() - self._began >= self._every)]

    def incoming(self, sums: list[float]) -> None:
        """Whether that rank has said so: the same on every rank."""
        self.due = self.due or sums[0] > 0
