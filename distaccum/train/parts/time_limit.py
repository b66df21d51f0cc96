"""The time limit of a run: when it has to stop, so that it can still save."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from time import monotonic
from typing import TYPE_CHECKING

from distaccum.accumulation.step import Outcome
from distaccum.data.window import Window
from distaccum.train.parts.base import Part

if TYPE_CHECKING:
    from distaccum.train.loop import Loop

_RECENT = 16  # windows
_WINDOWS_LEFT = 2  # the one that is about to begin, and one more: of a stream, what is taken is trained on
_SAVE_SLACK = 1.5
_BYTES_A_PARAMETER, _BYTES_A_SECOND = 12, 100e6  # of the first save, until one is measured: weights and two moments


class TimeLimit(Part):
    """Measures windows, evaluations and saves, and preempts the run when the rest of the time is needed to end.

    Args:
        max_time: seconds from ``began`` on; None for no limit.
        began: when the run began, on the clock ``now``.
        parameters: number of the model's; an estimate of the first save's time.
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

    def on_window(self, run: Loop, window: Window, outcome: Outcome) -> None:
        """A window has ended."""
        self.window_ended()

    def on_eval(self, run: Loop, results: Mapping[str, float]) -> None:
        """An evaluation has, and what the parts before this one do with it."""
        self.evaluated()

    def between_windows(self, run: Loop) -> None:
        """Preempts the run, if that is due and nobody has."""
        if self.is_near and not run.preempted_by:
            run.preempt("trainer.max_time is about to be over")

    def window_ended(self) -> None:
        """Ends the time of a window, from which evaluations and saves are excluded.

        The first window, in which code is compiled and loaders start, counts until there is a second.
        """
        if self._windows and not self._warm:
            self._warm = True
            self._windows.clear()
        self._windows.append(self._lap())

    def evaluated(self) -> None:
        """Ends the time of an evaluation."""
        self._evaluation = max(self._evaluation, self._lap())

    def saved(self, *, behind: float = 0.0) -> None:
        """Ends the time of a save; the longest one replaces the estimate.

        Args:
            behind: seconds for which its files were written while training went on. At the end of the run nothing goes
                on, and a save may have to wait for the one before.
        """
        took = self._lap() + 2 * behind
        self._save = max(took, 0.0 if self._guessed else self._save)
        self._guessed = False

    def copied(self) -> None:
        """Ends the time in which a save was begun that goes on in the background."""
        self._lap()

    @property
    def is_near(self) -> bool:
        """Whether two more windows, an evaluation and a save would exceed the limit."""
        if self._end is None:
            return False
        ahead = _WINDOWS_LEFT * max(self._windows, default=0.0) + self._evaluation + _SAVE_SLACK * self._save
        return self._now() + ahead >= self._end

    def _lap(self) -> float:
        before, self._mark = self._mark, self._now()
        return self._mark - before
