"""A window that a user's loop runs micro-batch by micro-batch; calls out of order raise by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from enum import Enum
from types import TracebackType
from typing import TYPE_CHECKING, Literal, NoReturn
from weakref import WeakSet

import torch
from torch import Tensor

from distaccum.accumulation.step import LossSums, await_reduction, backward
from distaccum.data.prefetch import on_device
from distaccum.data.window import MicroBatch, Window
from distaccum.distributed import activity
from distaccum.engines.base import Engine
from distaccum.errors import MisuseError, expect_peers
from distaccum.losses.normalize import SINGLE, Counts, LossSum, as_counts, normalize_loss

if TYPE_CHECKING:
    from distaccum.verification.proof import GradientProof


class Phase(Enum):
    """The state of a window; each call is legal in one phase only. The values are the words of error messages."""

    OPEN = "between two micro-batches"
    GIVEN = "before the micro-batch's accumulate()"
    FORWARD = "in accumulate(), before its backward()"
    BACKWARD = "in accumulate(), after its backward()"
    DONE = "on a window that is done"
    DROPPED = "on a window that was abandoned"


# Windows whose iterator was made and has not begun: zip() makes all of its iterators first.
_asked_for: WeakSet[OpenWindow] = WeakSet()


class OpenWindow:
    """Iterates over this rank's micro-batches, which are on the device by then.

    It is also the context manager of one micro-step, which ``Accumulator.accumulate()`` returns.

    Args:
        window: loaded and counted.
        engine: runs the micro-steps.
        prefetch: micro-batches on the device at once, the one being computed included.
        finish: makes the step, given the sums of the losses and this rank's count, if nothing was counted beforehand.
        failed: called before a call out of order raises, with what it raises, since other ranks may be in order.
        provisional_count: what the losses are divided by where the count is known only after the last backward.
        ranks: that share the window.
        proof: of the window's gradient, which notes what runs; None where it is not verified.
    """

    is_open: Literal[True] = True

    def __init__(
        self,
        window: Window,
        engine: Engine,
        *,
        prefetch: int,
        finish: Callable[[LossSums, float | Tensor], None],
        failed: Callable[[MisuseError], None],
        provisional_count: float,
        ranks: int,
        proof: GradientProof | None = None,
    ) -> None:
        self.proof = proof
        self.steps = False
        """Whether this rank has begun the window's step, where the other ranks are then, too."""
        self.plain, self.phase, self.provisional_count = window, Phase.OPEN, provisional_count
        self._engine, self._prefetch, self._finish, self._ranks = engine, prefetch, finish, ranks
        self._failed = failed
        self._sums = LossSums(engine.device, window.assignment)
        self._late_count: float | Tensor = 0.0
        self._current: MicroBatch | None = None
        self._left = len(window.micro_batches)
        self._random = engine.facts.numerics.random(engine.device)
        self._autocast: AbstractContextManager[object] | None = None
        self._micro_step: AbstractContextManager[object] | None = None

    @property
    def samples(self) -> int:
        """Samples in the window, over all ranks."""
        return self.plain.samples

    @property
    def counts(self) -> Counts:
        """The counts that the losses average over, over all ranks; empty where nothing is counted beforehand."""
        return self.plain.counts

    @property
    def count(self) -> float:
        """The count of the current micro-batch.

        Raises:
            MisuseError: nothing is counted beforehand, or several losses are.
        """
        if self._current is None or SINGLE not in self._current.counts:
            refuse("a mean without its count", "where none was counted beforehand", "pass the count as well")
        return self._current.count

    def __len__(self) -> int:
        """Micro-batches of this rank."""
        return len(self.plain.micro_batches)

    def __iter__(self) -> Iterator[MicroBatch]:
        """This rank's micro-batches; a rank without any takes part in the reduction when it asks for the first."""
        _asked_for.add(self)
        return self._micro_batches()

    def _micro_batches(self) -> Iterator[MicroBatch]:
        self.expect(Phase.OPEN, "iterating over a window", "take its micro-batches once")
        _asked_for.discard(self)
        if len(_asked_for) and self.samples < self._ranks:  # on every rank, at the same place
            what = f"two windows in one zip(), of {self.samples} samples for {self._ranks} ranks,"
            remedy = "take one window's micro-batches after the other's, or drop the ragged end of the data"
            refuse(what, "of which some rank has no micro-batch: the zip() ends there before the second", remedy)
        try:
            self._engine.begin_window(len(self.plain.micro_batches), self.plain.assignment)
        except RuntimeError as error:
            expect_peers(error)
            raise
        waiting = iter(self.plain.micro_batches)
        for batch in on_device(
            (micro.batch for micro in self.plain.micro_batches), self._engine.device, self._prefetch
        ):
            if self.phase is Phase.DROPPED:
                return
            if self.phase is not Phase.OPEN:
                self._expect_or_tell(Phase.OPEN, "the next micro-batch", "run each one in `with acc.accumulate():`")
            self._current, self.phase = MicroBatch(batch, next(waiting).counts), Phase.GIVEN
            if self.proof is not None:
                self.proof.records.relations.gives()
            yield self._current
        if not self.plain.micro_batches:
            self._run_finish()
        if self.phase is not Phase.DROPPED:
            remedy = "run each micro-batch in `with acc.accumulate():`"
            self._expect_or_tell(Phase.DONE, "the end of the window", remedy)

    def __enter__(self) -> None:
        if self.phase is not Phase.GIVEN:
            refuse("accumulate()", self.phase.value, "enter it once for each micro-batch of `for micro in window:`")
        if self.plain.keys:
            self._random.begin(self.plain.keys[-self._left])
        self._micro_step = self._engine.micro_step(sync=self._left == 1)
        self._micro_step.__enter__()
        self._autocast = self._engine.autocast()
        self._autocast.__enter__()
        if self.proof is not None:
            self.proof.records.before_forward(self._current)
        self.phase = Phase.FORWARD
        self._engine.activity.phase = activity.Phase.FORWARD

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._micro_step is not None
        assert self._autocast is not None
        self._autocast.__exit__(None, None, None)
        self._micro_step.__exit__(kind, value, trace)
        self._random.end()
        if self.proof is not None:
            self.proof.records.relations.micro_step_ended()
        if self.phase is Phase.DROPPED:
            return
        if kind is not None:
            if isinstance(value, MisuseError):
                self._failed(value)
            expect_peers(value)
            return
        if self.phase is not Phase.BACKWARD:
            remedy = "call acc.backward(loss) in it and not loss.backward(), also for a loss of zero"
            self._expect_or_tell(Phase.BACKWARD, "the end of accumulate()", remedy)
        self._left -= 1
        if self._left:
            self.phase = Phase.OPEN
        else:
            self._run_finish()

    def backward(self, loss: LossSum, count: float | Tensor | Counts | None) -> None:
        """Backpropagates the sums of one micro-batch's losses; see ``Accumulator.backward``."""
        if self.phase is not Phase.FORWARD:
            refuse("backward()", self.phase.value, "call acc.backward() once in each `with acc.accumulate():`")
        kind = self._engine.device.type
        casts = torch.is_autocast_enabled(kind)  # it covers forward and loss; a context of the user's may lie in ours
        torch.set_autocast_enabled(kind, False)
        try:
            known = self.plain.counts
            counts = self._known_counts(count) if known else self._provisional_counts(count)
            own_counts = self._current.counts if known and self._current else None
            if own_counts is None and count is not None and not isinstance(count, Tensor):  # a device's is not read
                own_counts = as_counts(count)
            if self.proof is not None:
                self._engine.activity.phase = activity.Phase.BACKWARD
                self.proof.before_backward(loss, self.provisional_count, count)
            factor = self._engine.facts.gradient_divide_factor
            backward(self._engine, normalize_loss(loss, counts, factor, own_counts=own_counts), last=self._left == 1)
            self._sums.add(loss)
        finally:
            torch.set_autocast_enabled(kind, casts)
        self.phase = Phase.BACKWARD

    def expect(self, phase: Phase, what: str, remedy: str) -> None:
        """Raises MisuseError unless the window is in ``phase``."""
        if self.phase is not phase:
            refuse(what, self.phase.value, remedy)

    def current(self, what: str) -> OpenWindow:
        """This window, for ``what`` is called in one."""
        return self

    def expect_none(self, what: str, *, tells: bool) -> NoReturn:
        """Raises MisuseError: ``what`` is called between two windows; where it ``tells``, other ranks learn of it."""
        try:
            refuse(what, self.phase.value, "run every micro-batch of a window before")
        except MisuseError as error:
            if tells:
                self._failed(error)
            raise

    def _expect_or_tell(self, phase: Phase, what: str, remedy: str) -> None:
        """As :meth:`expect`, and tells the other ranks, which would wait for this one."""
        try:
            self.expect(phase, what, remedy)
        except MisuseError as error:
            self._failed(error)
            raise

    def drop(self) -> None:
        """Ends a window of which nothing is kept; its micro-batches end where they are."""
        self.phase = Phase.DROPPED

    def mark_done(self) -> None:
        """Ends a window whose step was made; no call is legal afterwards."""
        self.phase = Phase.DONE

    def _known_counts(self, count: float | Tensor | Counts | None) -> Counts:
        """The window's counts; raises MisuseError where ``count`` differs from what was counted for the micro-batch."""
        assert self._current is not None
        if isinstance(count, Tensor):
            refuse("backward() with a tensor for a count", "where count= gave it already", "leave it out")
        if count is not None and as_counts(count) != self._current.counts:
            counted = dict(self._current.counts)
            refuse(f"backward() with the count {count}", f"where count= gave {counted}", "make them agree, or omit it")
        return self.plain.counts

    def _provisional_counts(self, count: float | Tensor | Counts | None) -> Counts:
        """Adds ``count`` to the late count; the true one is known at the window's end, when the step divides by it."""
        if count is None or isinstance(count, Mapping):
            what = f"backward() with the count {count}"
            refuse(what, "where nothing was counted beforehand", "pass a number, or give count= to the Accumulator")
        if not isinstance(count, Tensor):
            count = as_counts(count)[SINGLE]
        elif count.numel() != 1 or count.dtype is torch.bool:
            what = f"backward() with a count of shape {list(count.shape)} and type {count.dtype}"
            refuse(what, "for one micro-batch", "pass one number, as in (labels != -100).sum()")
        # fp64: fp32 stops counting at 2**24, and sums of 16-bit weights lose theirs far earlier
        self._late_count = self._late_count + (count.detach().double() if isinstance(count, Tensor) else count)
        return {SINGLE: self.provisional_count}

    def _run_finish(self) -> None:
        try:
            if not self.plain.micro_batches:
                await_reduction(self._engine)
                self._engine.shadow_micro_step()
            self._engine.activity.phase = activity.Phase.STEP
            with self._engine.finishing():
                self._finish(self._sums, self._late_count)
        except RuntimeError as error:
            expect_peers(error)
            raise
        self.mark_done()


class NoWindow:
    """Stands where no window is open: what is called in one is refused, and what is called between two is right."""

    is_open: Literal[False] = False
    plain: None = None
    steps = False

    def current(self, what: str) -> NoReturn:
        """Raises MisuseError: ``what`` is called in a window."""
        refuse(what, "outside a window", "loop over acc.windows(...)")

    def expect_none(self, what: str, *, tells: bool) -> None:
        """``what`` may be called."""


def refuse(what: str, where: str, remedy: str) -> NoReturn:
    """Raises MisuseError: ``what`` was called ``where`` it may not be."""
    raise MisuseError(f"{what} {where}: {remedy}")
