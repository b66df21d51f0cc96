"""Where the time of a process's windows goes: the phases of its loop, marked as they begin, on the clock that counts.

A phase is an attribute that the loop writes (:mod:`distaccum.distributed.activity`), watched here. Every moment between
the first mark and the last belongs to one row, so that the rows of a window add up to its wall time.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Variable

from distaccum.distributed.activity import Phase

ROWS = {
    "loading": "waiting for the window's data",
    "count": "the count's all-reduce: waiting for the ranks that still load",
    "copy": "copying micro-batches to the device",
    "forward": "forwards and losses",
    "backward": "backwards, with what they communicate meanwhile",
    "reduction": "what of the gradient's reduction is left when the last gradient is computed",
    "step": "norm, clipping, the optimizer's step, zeroing",
    "record": "the record's reduction, and reading it",
    "evaluation": "evaluations",
    "save": "saves",
    "other": "everything else: callbacks, logging, the loop itself",
}
_OF_PHASE = {
    Phase.LOADING: "loading",
    Phase.COUNTING: "count",
    Phase.COPYING: "copy",
    Phase.FORWARD: "forward",
    Phase.BACKWARD: "backward",
    Phase.REDUCTION: "reduction",
    Phase.STEP: "step",
    Phase.RECORD: "record",
    Phase.EVALUATION: "evaluation",
    Phase.SAVE: "save",
}
Seconds = dict[str, float]


class Clock(Protocol):
    """Marks moments, and tells the seconds between two of them once both have happened."""

    def now(self) -> Any:
        """This moment."""

    def between(self, first: Any, second: Any) -> float:
        """Seconds."""


class HostClock:
    """The host's clock, for a CPU, where work is done when a call returns."""

    def now(self) -> float:
        """See :class:`Clock`."""
        return perf_counter()

    def between(self, first: float, second: float) -> float:
        """See :class:`Clock`."""
        return second - first


class DeviceClock:
    """A GPU's: moments are events on the stream that computes, which the host is ahead of.

    A phase lasts from when the stream gets to what it queues until it has done it. While the host does not keep up, the
    stream waits: that time belongs to the phase that the host is in. Nothing waits for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> torch.cuda.Event:
        """See :class:`Clock`."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def between(self, first: torch.cuda.Event, second: torch.cuda.Event) -> float:
        """See :class:`Clock`."""
        second.synchronize()
        return float(first.elapsed_time(second)) / 1e3


class Timeline:
    """The marks of consecutive windows: a :class:`~distaccum.distributed.activity.Watcher`.

    Args:
        clock: of this rank's device.
        show: told the name of each range as it begins, for a trace; never within a backward.
    """

    def __init__(self, clock: Clock, show: Callable[[str], None]) -> None:
        self._clock, self._show = clock, show
        self._marks: list[tuple[str, Any]] = []
        self._ends: list[tuple[int, int]] = []  # of each window: the marks before its end, and its number in the run
        self._phase = Phase.BETWEEN
        self._mark("other")

    def enter(self, phase: Phase) -> None:
        """Begins a phase."""
        row = _OF_PHASE.get(phase, "other")
        if phase is Phase.LOADING and self._phase is Phase.COUNTING:  # the data are there, the window begins
            row = "other"
        self._phase = phase
        self._mark(row)
        self._show("backward and reduction" if phase is Phase.REDUCTION else row)

    def before_backward(self, loss: Tensor) -> None:
        """Begins a backward; what is left of it when the gradients are computed is the reduction's.

        Autograd calls back in the order in which it was asked, when it has computed all gradients. A backward's first
        hook, the loss's own, asks before an engine's hooks do, which then wait for their collectives.
        """
        self._mark("backward")
        if not loss.requires_grad:
            return

        def computed() -> None:  # maybe in a thread of autograd's
            self._mark("reduction")

        def began(_: Tensor) -> None:
            hook.remove()
            Variable._execution_engine.queue_callback(computed)

        hook = loss.register_hook(began)  # type: ignore[no-untyped-call]

    def end_window(self, number: int) -> None:
        """Ends a window, the ``number``-th of the run; the next one begins."""
        self._mark("other")
        self._ends.append((len(self._marks) - 1, number))

    @property
    def windows(self) -> int:
        """Windows that have ended."""
        return len(self._ends)

    def rows(self) -> list[Seconds]:
        """For every window that has ended the seconds of each of :data:`ROWS`, ``wall``, and ``window``, its number."""
        found, first = [], 0
        for last, number in self._ends:
            seconds: Seconds = dict.fromkeys(ROWS, 0.0)
            for (row, begins), (_, ends) in zip(
                self._marks[first:last], self._marks[first + 1 : last + 1], strict=True
            ):
                seconds[row] += self._clock.between(begins, ends)
            wall = self._clock.between(self._marks[first][1], self._marks[last][1])
            found.append({"window": number, "wall": wall, **seconds})
            first = last
        return found

    def _mark(self, row: str) -> None:
        self._marks.append((row, self._clock.now()))
