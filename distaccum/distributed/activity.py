"""What a rank is doing now: a record that its loop writes, and that a thread beside it reads.

Setting the phase is an attribute write and nothing else, so that the hot path may do it in every micro-step.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol


class Phase(StrEnum):
    """The part of a run that a rank is in; the values are the words of messages.

    Within a window they stand in the order in which a rank gets to them.
    """

    STARTING = "starting"
    LOADING = "loading data"
    COUNTING = "the count's all-reduce"
    COPYING = "copying to the device"
    FORWARD = "a forward"
    BACKWARD = "a backward"
    REDUCTION = "the gradient's reduction"
    STEP = "the optimizer's step"
    RECORD = "the record's reduction"
    BETWEEN = "logging or a callback"
    EVALUATION = "an evaluation"
    SAVE = "a save"
    ENDING = "the end of the run"


_ORDER = {phase: number for number, phase in enumerate(Phase)}
# Between two windows it depends on the run what comes first.
_ORDER |= dict.fromkeys((Phase.EVALUATION, Phase.SAVE, Phase.ENDING), _ORDER[Phase.BETWEEN])
MEETINGS = frozenset({Phase.COUNTING, Phase.REDUCTION, Phase.STEP, Phase.RECORD})
"""Phases in which a rank waits for the others."""
OF_A_WINDOW = frozenset(phase for phase in Phase if _ORDER[Phase.LOADING] <= _ORDER[phase] <= _ORDER[Phase.STEP])


class Watcher(Protocol):
    """Told of every phase by the thread that enters it."""

    def enter(self, phase: Phase) -> None:
        """The rank is in ``phase`` from now on."""


@dataclass(slots=True)
class Activity:
    """Where a rank is. ``window`` and ``step`` count the windows that are done and the updates that are known."""

    window: int = 0
    step: int = 0
    first: int = 0
    """The windows that were done when this process began."""
    done: int = 0
    """Batches that were done: of the evaluation, or micro-batches of the window."""
    total: int = 0
    """Batches that the evaluation takes on this rank."""
    loading_at: float = 0.0
    """When the data of the coming window were asked for, on the clock of ``time.perf_counter``; so are the others."""
    counted_at: float = 0.0
    """When the count's all-reduce returned."""
    arrived_at: float = 0.0
    """When this rank was ready for the gradient's reduction."""
    phase: Phase = Phase.STARTING
    watcher: Watcher | None = None
    """See :meth:`watch`."""

    def watch(self, watcher: Watcher | None) -> None:
        """Tells ``watcher`` of every phase from now on; None: nobody.

        While nobody watches, a phase stays an attribute write and no call: the class is another one meanwhile.
        """
        self.watcher = watcher
        self.__class__ = Activity if watcher is None else _Watched

    def now(self) -> Place:
        """A copy for another thread."""
        return Place(self.window, self.step, self.phase, self.done)


class _Watched(Activity):
    """An activity whose phases somebody watches."""

    __slots__ = ()

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name == "phase" and self.watcher is not None:
            self.watcher.enter(value)


@dataclass(frozen=True, slots=True)
class Place:
    """A rank's activity at one moment."""

    window: int
    step: int
    phase: Phase
    done: int = 0

    @property
    def key(self) -> tuple[int, int]:
        """Smaller where a rank has got less far."""
        if self.phase in (Phase.COPYING, Phase.BACKWARD):  # of one micro-step: the next one's forward comes after it
            return self.window, _ORDER[Phase.FORWARD]
        return self.window, _ORDER[self.phase]

    def __str__(self) -> str:
        """Such as ``the count's all-reduce of window 13 (step 12)``."""
        if self.phase in OF_A_WINDOW:
            return f"{self.phase} of window {self.window + 1} (step {self.step})"
        return f"{self.phase} after window {self.window} (step {self.step})"
