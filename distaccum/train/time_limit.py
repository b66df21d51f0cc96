"""When a run has to stop to have saved in time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import monotonic

_RECENT = 16  # windows
_WINDOWS_LEFT = 2  # the one that is about to begin, and one more: of a stream, what is taken is trained on
_SAVE_SLACK = 1.5
_BYTES_A_PARAMETER, _BYTES_A_SECOND = 12, 100e6  # of the first save, until one is measured: weights and two moments


class TimeLimit:
    """Measures windows, evaluations and saves, and says when there is just time to end.

    Args:
        max_time: seconds from ``began`` on; None for no end.
        began: when the run began, as ``now`` tells it.
        parameters: of the model, by which the time of the first save is guessed.
        now: the clock, in seconds.
    """

    def __init__(
        self, max_time: float | None, *, began: float, parameters: int, now: Callable[[], float] = monotonic
    ) -> None:
        self._end = None if max_time is None else began + max_time
        self._now = now
        self._windows: deque[float] = deque(maxlen=_RECENT)
        self._warm = False
        self._save = parameters * _BYTES_A_PARAMETER / _BYTES_A_SECOND
        self._guessed = True
        self._evaluation = 0.0
        self._mark = now()

    def window_ended(self) -> None:
        """A window is over; what else was timed since the last one does not belong to it.

        The first one, in which things are compiled and loaders start, counts until there is a second.
        """
        if self._windows and not self._warm:
            self._warm = True
            self._windows.clear()
        self._windows.append(self._lap())

    def evaluated(self) -> None:
        """An evaluation is over."""
        self._evaluation = max(self._evaluation, self._lap())

    def saved(self) -> None:
        """A save is over; the longest one counts, the guess no more."""
        self._save = max(self._lap(), 0.0 if self._guessed else self._save)
        self._guessed = False

    @property
    def is_near(self) -> bool:
        """Whether two more windows, an evaluation between them and a save would not end in time."""
        if self._end is None:
            return False
        ahead = _WINDOWS_LEFT * max(self._windows, default=0.0) + self._evaluation + _SAVE_SLACK * self._save
        return self._now() + ahead >= self._end

    def _lap(self) -> float:
        before, self._mark = self._mark, self._now()
        return self._mark - before
