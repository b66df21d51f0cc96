"""A window that a loop of one's own runs, micro-batch by micro-batch: the order of calls, held to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from enum import Enum
from typing import NoReturn

from torch import Tensor

from distaccum.accumulation.step import LossSums
from distaccum.data.prefetch import on_device
from distaccum.data.window import MicroBatch, Window
from distaccum.engines.base import Engine
from distaccum.errors import MisuseError
from distaccum.losses.normalize import SINGLE, Counts, LossSum, as_counts, normalize_loss


class Phase(Enum):
    """Where a window stands; each call is legal in one phase only."""

    OPEN = "between two micro-batches"
    GIVEN = "before the micro-batch's accumulate()"
    FORWARD = "in accumulate(), before its backward()"
    BACKWARD = "in accumulate(), after its backward()"
    DONE = "on a window that is done"


class OpenWindow:
    """Iterate over it for this rank's micro-batches, which are on the device then.

    It is also the context of one micro-step: that is what ``accumulate()`` gives.

    Args:
        window: loaded and counted.
        engine: does the backward.
        prefetch: micro-batches on the device at once.
        finish: steps, from the losses' sums and, where nothing was counted beforehand, what they sum over on this rank.
        provisional: there, what the losses are divided by until that is known.
    """

    def __init__(
        self,
        window: Window,
        engine: Engine,
        *,
        prefetch: int,
        finish: Callable[[LossSums, float | Tensor], None],
        provisional: float,
    ) -> None:
        self.plain, self.phase, self.provisional = window, Phase.OPEN, provisional
        self._engine, self._prefetch, self._finish = engine, prefetch, finish
        self._sums = LossSums(engine.device)
        self._late_count: float | Tensor = 0.0
        self._given: MicroBatch | None = None
        self._left = len(window.micro_batches)
        self._autocast: AbstractContextManager[object] | None = None
        self._micro_step: AbstractContextManager[object] | None = None

    @property
    def samples(self) -> int:
        """Samples in the window, over all ranks."""
        return self.plain.samples

    @property
    def counts(self) -> Counts:
        """What the losses average over, over all ranks; empty where it is not counted beforehand."""
        return self.plain.counts

    @property
    def count(self) -> float:
        """What the current micro-batch counts."""
        if self._given is None or SINGLE not in self._given.counts:
            refuse("a mean without its count", "where none was counted beforehand", "pass the count as well")
        return self._given.count

    def __len__(self) -> int:
        """This rank's micro-batches."""
        return len(self.plain.micro_batches)

    def __iter__(self) -> Iterator[MicroBatch]:
        """This rank's micro-batches; a rank without any takes part in the reduction when they are asked for."""
        self.expect(Phase.OPEN, "iterating over a window", "take its micro-batches once")
        self._engine.begin_window(len(self.plain.micro_batches))
        waiting = iter(self.plain.micro_batches)
        for batch in on_device(
            (micro.batch for micro in self.plain.micro_batches), self._engine.device, self._prefetch
        ):
            self.expect(Phase.OPEN, "the next micro-batch", "run each one in `with acc.accumulate():`")
            self._given, self.phase = MicroBatch(batch, next(waiting).counts), Phase.GIVEN
            yield self._given
        if not self.plain.micro_batches:
            self._engine.shadow_micro_step()
            self._done()
        self.expect(Phase.DONE, "the end of the window", "run each micro-batch in `with acc.accumulate():`")

    def __enter__(self) -> None:
        self.expect(Phase.GIVEN, "accumulate()", "enter it once for each micro-batch of `for micro in window:`")
        self._micro_step = self._engine.micro_step(sync=self._left == 1)
        self._micro_step.__enter__()
        self._autocast = self._engine.autocast()
        self._autocast.__enter__()
        self.phase = Phase.FORWARD

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        assert self._micro_step is not None
        self._end_forward()
        self._micro_step.__exit__(None, None, None)
        if kind is not None:
            return
        self.expect(Phase.BACKWARD, "the end of accumulate()", "call acc.backward() in it, also for a loss of zero")
        self._left -= 1
        if self._left:
            self.phase = Phase.OPEN
        else:
            self._done()

    def backward(self, total: LossSum, count: float | Tensor | Counts | None) -> None:
        """See ``Accumulator.backward``."""
        self.expect(Phase.FORWARD, "backward()", "call acc.backward() once in each `with acc.accumulate():`")
        self._end_forward()
        counts = self._agreed(count) if self.counts else self._noted(count)
        self._engine.backward(normalize_loss(total, counts, gradient_divide_factor=self._engine.gradient_divide_factor))
        self._sums.add(total)
        self.phase = Phase.BACKWARD

    def expect(self, phase: Phase, what: str, remedy: str) -> None:
        """Raises MisuseError unless the window stands at ``phase``."""
        if self.phase is not phase:
            refuse(what, self.phase.value, remedy)

    def _agreed(self, count: float | Tensor | Counts | None) -> Counts:
        """The window's counts, where the micro-batch's are what the loop says they are."""
        assert self._given is not None
        if isinstance(count, Tensor):
            refuse("backward() with a tensor for a count", "where count= gave it already", "leave it out")
        if count is not None and as_counts(count) != self._given.counts:
            counted = dict(self._given.counts)
            refuse(f"backward() with the count {count}", f"where count= gave {counted}", "make them agree, or omit it")
        return self.counts

    def _noted(self, count: float | Tensor | Counts | None) -> Counts:
        """A provisional count where the true one is known at the window's end only."""
        if not isinstance(count, int | float | Tensor):
            what = f"backward() with the count {count}"
            refuse(what, "where nothing was counted beforehand", "pass a number, or give count= to the Accumulator")
        # fp64: integers beyond 2**24 and sums of 16-bit weights would stall
        self._late_count = self._late_count + (count.detach().double() if isinstance(count, Tensor) else count)
        return {SINGLE: self.provisional}

    def _end_forward(self) -> None:
        """Autocast covers forward and loss, not the backward."""
        if self._autocast is not None:
            self._autocast.__exit__(None, None, None)
            self._autocast = None

    def _done(self) -> None:
        self._finish(self._sums, self._late_count)
        self.phase = Phase.DONE


def refuse(what: str, where: str, remedy: str) -> NoReturn:
    """Raises MisuseError."""
    raise MisuseError(f"{what} {where}: {remedy}")
