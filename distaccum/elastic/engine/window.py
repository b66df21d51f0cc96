"""One optimizer step over a window whose reduction comes after its last backward, and may fail: ranks may be lost.

The plan of a window that goes on without them says what is left of it, and who computes that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar

import torch
from torch import Tensor

from distaccum.accumulation.step import LossSums, Outcome, await_reduction, run_micro_steps
from distaccum.accumulation.two_pass import SecondPass
from distaccum.data.plan.batch import Plan
from distaccum.data.plan.units import Node, UnitAssignment, UnitEpoch, UnitPlan
from distaccum.data.window import Window
from distaccum.elastic.engine.ddp import resumable
from distaccum.engines.base import Engine
from distaccum.losses.base import Loss
from distaccum.losses.normalize import Counts


@dataclass(frozen=True, slots=True)
class SecondAssignment(UnitAssignment):
    """How a window goes on that has lost ranks: what each rank holds of it, and what it computes yet."""

    begun_by_others: ClassVar[bool] = True
    held: tuple[tuple[Node, ...], ...]
    computed: tuple[tuple[int, ...], ...]

    def blocks_of(self, rank: int) -> Sequence[int]:
        """See :class:`UnitAssignment`."""
        return self.computed[rank]

    def held_by(self, rank: int) -> Sequence[Node]:
        """See :class:`UnitAssignment`."""
        return self.held[rank]

    def units_of(self, rank: int) -> Sequence[int]:
        """See :class:`UnitAssignment`."""
        return [unit for block in self.computed[rank] for unit in self.units_of_block(block)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Again:
    """A window that goes on with other ranks: which one, how it is dealt now, and its counts, which are known."""

    epoch: int
    window: int
    assignment: SecondAssignment
    counts: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class ContinuedPlan(UnitPlan):
    """A plan of units, one of whose windows other ranks have begun.

    Args:
        again: that window.
    """

    again: Again

    @classmethod
    def of(cls, plan: UnitPlan, again: Again) -> ContinuedPlan:
        """The plan, which goes on with that window."""
        return cls(**{one.name: getattr(plan, one.name) for one in fields(UnitPlan)}, again=again)

    def for_ranks(self, ranks: int) -> Plan:
        """The same windows, dealt to another number of ranks: none of them is begun."""
        own = {one.name: getattr(self, one.name) for one in fields(UnitPlan)}
        return UnitPlan(**own).for_ranks(ranks)

    def epoch(self, epoch: int) -> UnitEpoch:
        """The epoch's windows."""
        return _ContinuedEpoch(plan=self, epoch=epoch, windows=self.of_one_rank.epoch(epoch), again=self.again)


@dataclass(frozen=True, kw_only=True)
class _ContinuedEpoch(UnitEpoch):
    """An epoch in which a window may be begun."""

    again: Again

    def _begun(self, k: int) -> bool:
        return (self.again.epoch, self.again.window) == (self.epoch, k)

    def dealt(self, k: int, units: int) -> UnitAssignment:
        """See :class:`UnitEpoch`."""
        return self.again.assignment if self._begun(k) else super().dealt(k, units)

    def counts(self, k: int, counted: Counts) -> Counts:
        """See :class:`UnitEpoch`: what is left of a window that was begun counts less than the whole."""
        return self.again.counts if self._begun(k) else counted


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedOutcome(Outcome):
    """The result of a window whose losses have travelled with the gradient: each rank has those ``of_all``."""

    of_all: Tensor

    def placed(self, rank: int) -> Tensor:
        """See :class:`Outcome`; those of all ranks are rank 0's."""
        return self.of_all if rank == 0 else torch.zeros_like(self.of_all)


def run_window(engine: Engine, window: Window, loss: Loss, *, prefetch: int = 2) -> Outcome:
    """As the core's ``run_window``; the losses of all ranks travel with the gradient, so that each rank has them.

    A rank that is lost before the step then takes no loss with it.
    """
    losses = run_micro_steps(engine, window, loss, prefetch=prefetch)
    if isinstance(loss, SecondPass):  # of no unit: rank 0 has the window's
        losses = LossSums(engine.device)
        losses.add(loss.sums)
    await_reduction(engine)
    elastic = resumable(engine)
    own = losses.outcome(window.counts, None)
    elastic.send_along(own.placed(engine.world.rank))
    if window.micro_batches:
        elastic.reduce()
    else:
        engine.shadow_micro_step()
    step = engine.step()
    return SharedOutcome(
        loss_sums=own.loss_sums,
        counts=own.counts,
        grad_norm=step.grad_norm,
        step=step,
        assignment=own.assignment,
        by_unit=own.by_unit,
        logged=own.logged,
        of_all=elastic.received,
    )
