"""A run proves its own gradient: when a window is computed once more by another road, and what follows."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from torch import Tensor

from distaccum.data.hooks import WindowHook
from distaccum.data.window import Window
from distaccum.distributed.memory import is_out_of_memory, out_of_memory
from distaccum.engines.base import Engine
from distaccum.errors import VerificationError
from distaccum.losses.base import Loss
from distaccum.losses.normalize import Count

if TYPE_CHECKING:
    from distaccum.verification.proof import GradientProof

# What a window without a step leaves: the clocks where they were, and a loss scale that can still be used.


class SkippedWindows:
    """Looks at the window before, where that was to be verified and its gradient was not finite.

    Args:
        engine: has the loss scale.
        steps: the updates that the run has counted so far.
    """

    def __init__(self, engine: Engine, steps: Callable[[], int]) -> None:
        self._engine, self._steps = engine, steps
        self._before: int | None = None  # updates, before a window that made none

    def note(self, reported: Tensor, steps_before: int) -> None:
        """Called after a window's step, with the norm that it reports."""
        self._before = None if math.isfinite(float(reported)) else steps_before

    def check(self) -> None:
        """Called before the next window.

        Raises:
            VerificationError: a skipped window counts as an update, or the loss scale is below its floor.
        """
        before, self._before = self._before, None
        if before is not None and (now := self._steps()) != before:
            raise VerificationError(
                "the gradient of the step before was not finite, so no weight has moved, and the run counts it as an "
                f"update: step went from {before} to {now}, and the learning rate follows it"
            )
        scale, floor = self._engine.loss_scale, self._engine.facts.min_loss_scale
        if scale is not None and floor is not None and not float(scale) >= floor:
            raise VerificationError(
                f"the loss scale has fallen to {float(scale):g}, below its floor of {floor:g}: gradients underflow, "
                "and at 0 they are NaN without being found so"
            )


_log = logging.getLogger(__name__)
FIRST, NEVER = "first", "never"
_UNPROVED = nullcontext[Callable[[Tensor], object]](id)  # most windows: nobody looks at the norm


class Verifier(WindowHook):
    """Says which windows are verified, and runs their proofs.

    Args:
        engine: whose step is looked at.
        when: ``first``: the first window of this process, or of a restored state, whose gradient is finite; a number:
            that one, and one every so many windows; ``never``.
        clip_norm, clip_value: what the engine was told.
        count: what the loss is divided by is counted so; None where the loop counts afterwards.
        steps: the updates that the run has counted so far.
        allow: relations that a window may break, of ``config.checks.RELATIONS``.
    """

    def __init__(
        self,
        engine: Engine,
        when: str | int,
        *,
        clip_norm: float | None,
        clip_value: float | None,
        count: Count | None = None,
        steps: Callable[[], int] = lambda: 0,
        allow: Sequence[str] = (),
    ) -> None:
        self._engine, self._world, self._when, self._count = engine, engine.world, when, count
        self._clip_norm, self._clip_value, self._allow = clip_norm, clip_value, allow
        self._steps, self._skipped = steps, SkippedWindows(engine, steps)
        self._loss_checked = self._sums = self._warned = False
        self.summary = ""
        """What the last proof found, for people; empty where there was none, or none could be given."""
        self.restarted()

    def restarted(self) -> None:
        """The next window is verified again, unless none is."""
        self._since: int | None = None  # windows since the last one that was verified
        self.proof: GradientProof | None = None
        """Of the current window; None where it is not verified."""
        self._judged = False  # whether the ranks have begun to compare it

    def window_begins(self, window: Window) -> None:
        """Begins a window; every rank calls it.

        Raises:
            VerificationError: the one before was to be verified, made no step, and left something else; on all ranks.
        """
        self.proof = None
        if window.assignment is not None and window.assignment.begun_by_others:
            return  # what others have computed of it cannot be run again
        if self._due():
            self._skipped.check()
            self.proof = self.proof_of(window)
            if self._count is not None:
                self.proof.records.relations.check_counts(window, self._count)
        if self._since is not None:
            self._since += 1

    def _due(self) -> bool:
        if self._when == NEVER:  # a window that the loop has had verified itself changes nothing
            return False
        return self._since is None or (self._when != FIRST and self._since >= int(self._when))

    def proof_of(self, window: Window) -> GradientProof:
        """The proof of a window that has not begun."""
        from distaccum.verification.proof import GradientProof  # noqa: PLC0415  for the windows that are verified

        proof = GradientProof(self._engine, window, clip_norm=self._clip_norm, clip_value=self._clip_value)
        proof.records.relations.allow = self._allow
        return proof

    def prove(self, window: Window, loss: Loss) -> GradientProof:
        """Begins a proof of a window that has not begun, by running it again with ``loss``; a collective."""
        self.proof = self.proof_of(window)
        self.proof.records.rerun_with(loss)
        self.check_loss(window, loss)
        return self.proof

    def window_dropped(self) -> None:
        """Ends a window that makes no step; the next one is verified."""
        if self.proof is not None:
            self.proof.close()
            self.proof = None

    def check_loss(self, window: Window, loss: Loss) -> None:
        """Whether the loss is a sum over what is counted; once, with the first window that is verified.

        Raises:
            VerificationError: it is not; on all ranks.
            ResourceError: a forward that the check runs is out of memory.
        """
        if self.proof is None:
            return
        if not self._loss_checked:
            from distaccum.verification.additivity import check_loss  # noqa: PLC0415  as above

            self._loss_checked = True
            try:
                self._sums = check_loss(self._engine, window, loss, self._count, parts="parts" not in self._allow)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                raise out_of_memory(error, self._engine.world) from error
        self.proof.records.sums = self._sums

    def before_step(self, divisor: float = 1.0) -> None:
        """Compares what the engine is about to step on; a collective where a proof is open.

        Raises:
            VerificationError: it is not the window's gradient; on all ranks, and no weight has moved.
        """
        if self.proof is not None:
            self._judged = True
            self.proof.before_step(divisor)

    def stepping(self) -> AbstractContextManager[Callable[[Tensor], object]]:
        """Around the window's step, :meth:`before_step` included; is to be told the norm that the step reports.

        After an error in the window's forwards and backwards the proof stays open: the other ranks have theirs, and
        this one takes part in it when it gives the window up. :meth:`window_dropped` ends it.

        Raises:
            VerificationError: the optimizers are given something else; on all ranks, and no weight has moved.
        """
        return _UNPROVED if self.proof is None else self._proved(self.proof)

    @contextmanager
    def _proved(self, proof: GradientProof) -> Iterator[Callable[[Tensor], object]]:
        reported: list[Tensor] = []
        before, self._judged = self._steps(), False
        try:
            yield reported.append
            (norm,) = reported
            proof.after_step(norm)
            self._skipped.note(norm, before)
        finally:
            if self._judged:
                self.window_dropped()
        if proof.conclusive:
            self._since, self.summary = 1, proof.summary
            if self._world.is_main and self.summary:
                if proof.doubtful and not self._warned:
                    self._warned = True
                    _log.warning("not verified: %s", self.summary)
                else:
                    _log.info("verified: %s", self.summary)
