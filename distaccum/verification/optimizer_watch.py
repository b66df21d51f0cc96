"""What the optimizers are given, looked at in their own steps before they move a weight."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from distaccum.engines.base import Engine
from distaccum.engines.modules import to_local, trained
from distaccum.engines.rules import around_step
from distaccum.errors import VerificationError, shorten
from distaccum.verification.expected import (
    CLOSING,
    NAMED,
    OF_NORM,
    ONE_FACTOR,
    Expected,
    square,
    whole_numel,
    wide,
    words,
)


class OptimizerWatch:
    """Compares norms, until :meth:`close`: of what each optimizer is given, unscaled, with what it should be.

    So what an engine does last counts too: unscaling, dividing, clipping.

    Args:
        engine: whose step is looked at; making one is a collective.
        expected: what they should be given.
        clip_norm: what the engine was told.
        measures: what a wrong factor may be made of, with names.
    """

    def __init__(
        self, engine: Engine, expected: Expected, *, clip_norm: float | None, measures: Mapping[str, float]
    ) -> None:
        self.agrees = False
        """Whether an optimizer was given what it should be."""
        self.factor: float | None = None
        """A factor of the whole gradient that may be by design."""
        self._engine, self._world, self.expected = engine, engine.world, expected
        self._clip_norm = clip_norm
        self._coefficient = 1.0 if clip_norm is None else min(1.0, clip_norm / (expected.norm + 1e-6))
        self._measures = {**measures, "(clip coefficient)": self._coefficient}
        self._called = False
        # The engine has made a finite gradient NaN, and says why; or it may leave out the step of too large a one.
        self._spoiled = expected.norm * (1 + expected.tolerance) + expected.allowed >= engine.norm_bound
        self._found, self._seen = 0.0, 0  # of the engine's copies, in the optimizers so far
        by_id = {id(p): name for name, p in engine.probe.stepped.items()}
        with engine.probe.stepped_groups:
            held = [p for optimizer in engine.optimizers for group in optimizer.param_groups for p in group["params"]]
        (known,) = self._world.all_reduce_host([any(id(p) in by_id for p in held)])
        # An engine may step on copies of its own, which hold several parameters end to end.
        self._names: Mapping[int, str] | None = by_id if known else None
        self._left = sum(p.numel() for p in held)
        self._hooks = [hook for optimizer in engine.optimizers for hook in self._hooks_on(optimizer)]

    def _hooks_on(self, optimizer: Optimizer) -> list[Any]:
        first = around_step(optimizer, self._before_step)
        hooks: Any = optimizer._optimizer_step_pre_hooks
        hooks.move_to_end(first[0].id, last=False)  # what a hook of the user's does is the user's
        return first

    def close(self) -> None:
        """Leaves the optimizers alone."""
        while self._hooks:
            self._hooks.pop().remove()

    # --- in an optimizer's step

    def _before_step(self, optimizer: Optimizer) -> None:
        """A hook that runs before the optimizer moves a weight, with its gradients as they are then."""
        tensors = [p for group in optimizer.param_groups for p in group["params"]]
        divisor = getattr(optimizer, "grad_scale", None)
        skipped = getattr(optimizer, "found_inf", None)
        found = _square_of(optimizer)
        found /= 1.0 if divisor is None else float(divisor) ** 2
        if skipped is not None and bool(skipped):
            self._spoiled = self._spoiled or not math.isfinite(found)
            found = 0.0
        self._called = True
        if self._names is None:
            self._add_copies(found, sum(tensor.numel() for tensor in tensors))
            return
        names = [self._names[id(tensor)] for tensor in tensors if id(tensor) in self._names]
        self._agree_on(found, sum(self.expected.own.get(name, 0.0) for name in names))

    def _add_copies(self, found: float, elements: int) -> None:
        """Copies say nothing of their parameters: all of them are looked at together, over all ranks."""
        self._found += found
        self._seen += elements
        if self._seen < self._left:
            return
        total, seen = self._world.all_reduce_host([self._found, float(self._seen)])
        elements = sum(whole_numel(p) for p in trained(self._engine.unwrapped_model).values())
        copies = max(1, round(seen / elements))  # padding aside
        self._agree_on(total / copies, self.expected.clipped)

    # --- the comparison

    def _agree_on(self, found: float, should: float) -> None:
        """Compares squared norms of what is stepped on and of what should be; a collective."""
        norm, right = math.sqrt(found), math.sqrt(should)
        clipped = right * self._coefficient
        allowed = self.expected.tolerance * right + self._coefficient * self.expected.allowed
        wrong = not abs(norm - clipped) <= allowed
        any_wrong, spoiled = self._world.all_reduce_host([wrong, self._spoiled])
        if spoiled:
            return
        if not any_wrong:
            self.agrees = True
            return
        everyone = self._world.all_gather_object((norm, clipped, wrong))
        if self._may_be_meant(self._world.all_gather_object((norm, right))):
            self.agrees = True
            return
        said = [(f"rank {rank}", each / of if of else math.inf) for rank, (each, of, bad) in enumerate(everyone) if bad]
        raise VerificationError(self._told(said))

    def _may_be_meant(self, norms: list[tuple[float, float]]) -> bool:
        """Whether the gradient that the optimizers get may be right, and by design not the slope of the loss.

        Args:
            norms: every rank's, and that of the engine's gradient as far as the slope says, before clipping.
        """
        if self.expected.faults is None:
            return False
        largest = max((right for _, right in norms), default=0.0)
        factors = [norm / right for norm, right in norms if right > OF_NORM * largest]
        if not factors or not all(map(math.isfinite, factors)):
            return False
        factor = max(factors)
        if factor - min(factors) > ONE_FACTOR * factor and self.expected.clip_value is None:
            return False
        total = factor * self.expected.norm
        if self._clip_norm is not None and total > (1 - ONE_FACTOR) * self._clip_norm:
            return total < (1 + ONE_FACTOR) * self._clip_norm  # the norm that the step reports says by how much
        if self.expected.is_fault(factor):
            return False
        self.factor = factor
        return True

    def _told(self, said: list[tuple[str, float]]) -> str:
        factors = {round(factor, 3) for _, factor in said}
        if len(factors) == 1:
            where = "" if len(said) == self._world.size else f" on {shorten([rank for rank, _ in said])}"
            how = f"{self._worded(said[0][1])}{where}"
        else:
            how = "; ".join(f"{self._worded(factor)} on {rank}" for rank, factor in said)
        return (
            f"the optimizer is given the step's gradient times {how}: compared with {self.expected.road}, before it "
            f"steps; no weight has moved. {CLOSING}"
        )

    def _worded(self, factor: float) -> str:
        return words(factor, self._measures, max(5e-3, self.expected.tolerance))

    # --- after the step

    def finish(self, reported: float) -> None:
        """Looks at what is left when all have stepped; a collective.

        Args:
            reported: the norm of the gradient as the engine says it: clipping hides a wrong factor, this does not.

        Raises:
            VerificationError: no optimizer was asked to step, the norm is wrong, or gradients are left; on all ranks.
        """
        if not self._called:  # the other ranks may wait in an optimizer's step
            self._agree_on(0.0, max(self.expected.whole, 1e-30))
        left = [
            name
            for name, p in self._engine.unwrapped_model.named_parameters()
            if p.grad is not None and bool((to_local(p.grad) != 0).any())
        ]
        norm = self.expected.norm
        factor = reported / norm if norm else 0.0
        off = not abs(reported - norm) <= self.expected.tolerance * norm + self.expected.allowed
        if off and not self.expected.is_fault(factor):
            off, self.factor = False, factor
        any_left, any_off = self._world.all_reduce_host([bool(left), off])
        if any_off:
            raise VerificationError(
                f"the gradient norm that the step reports and clips by is {self._worded(reported / norm)} that "
                f"of {self.expected.road} ({reported:.6g} and {norm:.6g}). {CLOSING}"
            )
        if any_left:
            names = self._world.all_gather_names(left)
            raise VerificationError(
                f"gradients of {shorten(names, NAMED)} are still there after the step, and would be added to those of "
                "the next window. Nothing but the engine may accumulate into a parameter's grad"
            )


def _square_of(optimizer: Optimizer) -> float:
    """The squared norm of what an optimizer holds on this rank."""
    tensors = [p for group in optimizer.param_groups for p in group["params"]]
    return sum(square(wide(to_local(tensor.grad))) for tensor in tensors if tensor.grad is not None)
