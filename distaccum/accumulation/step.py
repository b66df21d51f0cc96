"""One optimizer step over one accumulation window: the whole update on one screen, whatever the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import NoReturn

import torch
from torch import Tensor

from distaccum.data.plan.units import UnitAssignment
from distaccum.data.prefetch import on_device
from distaccum.data.window import Window
from distaccum.distributed.activity import Phase
from distaccum.distributed.world import World
from distaccum.engines.base import Engine, StepOutput
from distaccum.engines.modules import from_host
from distaccum.errors import MisuseError
from distaccum.losses.base import Loss
from distaccum.losses.normalize import Counts, LossSum, as_loss_sums, logged_sums, normalize_loss


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The result of one window. Its tensors stay on the device until somebody reads them, and are 0-dim.

    ``loss_sums`` are this rank's shares, by loss; ``counts`` (of all ranks) and ``grad_norm`` (of the global gradient,
    unscaled and before clipping) are the same on every rank. ``step`` is what the engine's step returned, None where
    the window counted nothing. ``applied``, ``finite`` and ``loss_scale`` wait until the device has computed the step.
    Where the window's units are dealt, ``by_unit`` has the losses of this rank's units, shape ``(losses, units)``.
    ``logged`` has what the loss logs beside: by name a sum and its count, for each of these units, or once.
    """

    loss_sums: Mapping[str, Tensor]
    counts: Counts
    grad_norm: Tensor
    step: StepOutput | None
    assignment: UnitAssignment | None = None
    by_unit: Tensor | None = None
    logged: Sequence[Mapping[str, Tensor]] = ()

    @property
    def applied(self) -> bool:
        """Whether the optimizers stepped; False as well where the window counted nothing."""
        return self.step is not None and self.step.applied

    def placed(self, rank: int) -> Tensor:
        """The losses of ``rank``'s units at their places among all, shape ``(losses, units)``; elsewhere zeros.

        Added over the ranks these are the losses of all units, exactly. Where none are dealt, a window is one unit.
        They are fp64: a rank without a micro-batch does not know the dtype of the other ranks' losses.
        """
        if self.assignment is None:
            return torch.stack(list(self.loss_sums.values())).double().unsqueeze(1)
        assert self.by_unit is not None
        every = self.by_unit.new_zeros((self.by_unit.shape[0], self.assignment.units))
        every[:, list(self.assignment.units_of(rank))] = self.by_unit
        return every

    def logged_of(self, rank: int, names: Sequence[str], like: Tensor) -> Tensor:
        """What ``rank``'s loss logs, in the places of the losses ``like``: by name a row of sums and one of counts."""
        every = like.new_zeros((2 * len(names), like.shape[1]))
        places = range(1) if self.assignment is None else self.assignment.units_of(rank)
        for place, found in zip(places, self.logged, strict=False):
            for i, name in enumerate(names):
                if name in found:
                    every[2 * i : 2 * i + 2, place] = found[name]
        return every

    @property
    def finite(self) -> bool:
        """Whether the gradient was neither NaN nor infinite."""
        return self.step is None or self.step.finite

    @property
    def loss_scale(self) -> float:
        """The scale of this window's gradients; 1.0 without a loss scaler."""
        return 1.0 if self.step is None else self.step.loss_scale


def all_reduce_loss_sums(
    outcome: Outcome, world: World, *, logged: Sequence[str] = (), own: Sequence[float] = ()
) -> Tensor:
    """The losses of a window summed over all ranks: fp64, one for each of ``outcome.counts``; a collective.

    After them come sum and count of what is ``logged`` by these names, then the ``own`` numbers of every rank, one rank
    after the other; each has as many. Where units are dealt, their losses are added in the units' order.
    """
    placed = outcome.placed(world.rank)
    placed = torch.cat([placed, outcome.logged_of(world.rank, logged, placed)])
    sums = placed.flatten()
    if own:
        others = world.size - world.rank - 1
        slots = [*[0.0] * (len(own) * world.rank), *own, *[0.0] * (len(own) * others)]
        sums = torch.cat([sums, from_host(slots, sums)])
    found = world.all_reduce_(sums.unsqueeze(1)).squeeze(1)
    by_unit, rest = torch.split(found, [placed.numel(), len(found) - placed.numel()])
    return torch.cat([by_unit.view(placed.shape).sum(1), rest])


class LossSums:
    """The sums of a window's losses on this rank, by name; nothing is read from the device.

    Args:
        device: of the losses.
        assignment: of the window's units; each :meth:`add` is then of one.
    """

    def __init__(self, device: torch.device, assignment: UnitAssignment | None = None) -> None:
        self._device, self._assignment = device, assignment
        self._sums: dict[str, Tensor] = {}
        self._by_unit: list[Mapping[str, Tensor]] = []
        self._logged: list[dict[str, Tensor]] = []

    def add(self, loss: LossSum) -> None:
        """Adds one micro-batch's losses."""
        for name, part in as_loss_sums(loss).items():
            before = self._sums.get(name)
            # A copy: the loop may change the loss that it gave in place.
            self._sums[name] = part.detach().clone() if before is None else before + part.detach()
        if self._assignment is not None or not self._logged:
            self._logged.append({})
        if isinstance(loss, tuple):
            for name, pair in logged_sums(loss, self._device).items():
                self._logged[-1][name] = self._logged[-1].get(name, 0.0) + pair
        if self._assignment is not None:
            self._by_unit.append({name: part.detach().double() for name, part in as_loss_sums(loss).items()})

    def outcome(self, counts: Counts, step: StepOutput | None) -> Outcome:
        """The outcome of a window that counts ``counts``; without ``step`` of one that was skipped."""
        zero = torch.zeros((), device=self._device)
        return Outcome(
            loss_sums={name: self._sums.get(name, zero) for name in counts},
            counts=counts,
            grad_norm=step.grad_norm if step else zero,
            step=step,
            assignment=self._assignment,
            by_unit=None if self._assignment is None else self._units(counts),
            logged=self._logged,
        )

    def _units(self, counts: Counts) -> Tensor:
        zero = torch.zeros((), dtype=torch.float64, device=self._device)
        each = [torch.stack([unit.get(name, zero) for name in counts]) for unit in self._by_unit]
        return torch.stack(each, 1) if each else zero.new_zeros((len(counts), 0))


def backward(engine: Engine, loss: Tensor, *, last: bool) -> None:
    """The backward of a divided loss, which frees its graph; in the ``last`` one of the window the engine reduces.

    Raises:
        MisuseError: a part of the graph is another backward's, and freed.
    """
    activity = engine.activity
    if last:
        activity.phase, activity.arrived_at = Phase.REDUCTION, perf_counter()
    else:
        activity.phase = Phase.BACKWARD
    for before in engine.hooks.before_backward:
        before(loss)
    try:
        engine.backward(loss)
    except RuntimeError as error:
        _refuse_freed(error)
    for after in engine.hooks.after_backward:
        after()


def await_reduction(engine: Engine) -> None:
    """Notes that this rank is ready for the gradient's reduction."""
    engine.activity.phase, engine.activity.arrived_at = Phase.REDUCTION, perf_counter()


def _refuse_freed(error: RuntimeError) -> NoReturn:
    """Raises a backward's error: in our own words where a part of its graph is another backward's, and freed."""
    if "backward through the graph a second time" in str(error):
        problem = "the loss depends on what was computed in an earlier micro-batch, or before its accumulate()"
        remedy = "detach what is carried on, as in hidden = hidden.detach(), and compute the rest in each accumulate()"
        raise MisuseError(f"{problem}, whose graph is freed: {remedy}") from error
    raise error


def run_window(engine: Engine, window: Window, loss: Loss, *, prefetch: int = 2) -> Outcome:
    """Computes the exact gradient of the window's global mean loss, and steps.

    The loss is a sum, and it is divided once: by the count of the whole window on all ranks.
    ``gradient_divide_factor`` undoes the engine's own averaging. Only a rank's last micro-step, the boundary,
    communicates gradients, except on fsdp2 with ``sync=every``, which reduces in each micro-step. Random numbers, such
    as those of dropout, are keyed by the micro-batch (``window.keys``).

    Args:
        engine: owns the model, the gradients and the step.
        window: its counts must be known.
        loss: gives a sum for each micro-batch; one of a whole window is ``represented`` before (see ``two_pass``).
        prefetch: micro-batches on the device at once, the one being computed included; at least 2.
    """
    losses = run_micro_steps(engine, window, loss, prefetch=prefetch)
    if not window.micro_batches:
        await_reduction(engine)
        engine.shadow_micro_step()  # the others' reduction needs this rank's zeros
    return losses.outcome(window.counts, engine.step())


def run_micro_steps(engine: Engine, window: Window, loss: Loss, *, prefetch: int = 2) -> LossSums:
    """The forwards and backwards of :func:`run_window`."""
    losses, last, activity = LossSums(engine.device, window.assignment), len(window.micro_batches) - 1, engine.activity
    random, factor = engine.facts.numerics.random(engine.device), engine.facts.gradient_divide_factor
    engine.begin_window(len(window.micro_batches), window.assignment)
    activity.phase, activity.done = Phase.COPYING, 0
    for i, batch in enumerate(on_device((micro.batch for micro in window.micro_batches), engine.device, prefetch)):
        activity.done = i
        with random.keyed(window.keys, i), engine.micro_step(sync=i == last):  # only the last one reduces
            activity.phase = Phase.FORWARD
            with engine.autocast():
                total = loss(engine.model, batch)  # a sum
            own = window.micro_batches[i].counts
            divided = normalize_loss(total, window.counts, factor, own_counts=own)  # once
            backward(engine, divided, last=i == last)
        losses.add(total)
        if i < last:
            activity.phase = Phase.COPYING
    return losses
