"""One optimizer step over one accumulation window: the whole update on one screen, whatever the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import NoReturn

import torch
from torch import Tensor

from distaccum.data.prefetch import on_device
from distaccum.data.window import Window
from distaccum.distributed.activity import Phase
from distaccum.distributed.random import KeyedRandom
from distaccum.distributed.world import World
from distaccum.engines.base import Engine, StepOutput
from distaccum.errors import MisuseError
from distaccum.losses.base import Loss
from distaccum.losses.normalize import Counts, LossSum, as_loss_sums, normalize_loss


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The result of one window. Tensors are 0-dim and stay on the device until somebody reads them.

    ``loss_sums`` are this rank's shares, by loss; ``counts`` (of all ranks) and ``grad_norm`` (of the global gradient,
    unscaled and before clipping) are the same on every rank. ``step`` is what the engine's step returned, None where
    the window counted nothing. ``applied``, ``finite`` and ``loss_scale`` wait until the device has computed the step.
    """

    loss_sums: Mapping[str, Tensor]
    counts: Counts
    grad_norm: Tensor
    step: StepOutput | None

    @property
    def applied(self) -> bool:
        """Whether the optimizers stepped; False as well where the window counted nothing."""
        return self.step is not None and self.step.applied

    @property
    def finite(self) -> bool:
        """Whether the gradient was neither NaN nor infinite."""
        return self.step is None or self.step.finite

    @property
    def loss_scale(self) -> float:
        """The scale of this window's gradients; 1.0 without a loss scaler."""
        return 1.0 if self.step is None else self.step.loss_scale


def all_reduce_loss_sums(outcome: Outcome, world: World, *, own: Sequence[float] = ()) -> Tensor:
    """The losses of a window summed over all ranks: fp64, one for each of ``outcome.counts``; a collective.

    After them come the ``own`` numbers of every rank, one rank after the other; each has as many.
    """
    # fp64: a rank without a micro-batch does not know the dtype of the other ranks' losses.
    sums = torch.stack(list(outcome.loss_sums.values())).double()
    if own:
        others = world.size - world.rank - 1
        slots = [*[0.0] * (len(own) * world.rank), *own, *[0.0] * (len(own) * others)]
        sums = torch.cat([sums, torch.tensor(slots, dtype=sums.dtype).to(sums.device)])
    return world.all_reduce_(sums.unsqueeze(1)).squeeze(1)


class LossSums:
    """The sums of a window's losses on this rank, by name; nothing is read from the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sums: dict[str, Tensor] = {}

    def add(self, loss: LossSum) -> None:
        """Adds one micro-batch's losses."""
        for name, part in as_loss_sums(loss).items():
            before = self._sums.get(name)
            # A copy: the loop may change the loss that it gave in place.
            self._sums[name] = part.detach().clone() if before is None else before + part.detach()

    def outcome(self, counts: Counts, step: StepOutput | None) -> Outcome:
        """The outcome of a window that counts ``counts``; without ``step`` of one that was skipped."""
        zero = torch.zeros((), device=self._device)
        sums = {name: self._sums.get(name, zero) for name in counts}
        return Outcome(loss_sums=sums, counts=counts, grad_norm=step.grad_norm if step else zero, step=step)


def backward(engine: Engine, loss: Tensor) -> None:
    """The engine's backward, which frees the loss's graph.

    Raises:
        MisuseError: a part of the graph is another backward's, and freed.
    """
    try:
        engine.backward(loss)
    except RuntimeError as error:
        refuse_freed(error)


def refuse_freed(error: RuntimeError) -> NoReturn:
    """Raises a backward's error: in our own words where a part of its graph is another backward's, and freed."""
    if "backward through the graph a second time" in str(error):
        problem = "the loss depends on what was computed in an earlier micro-batch, or before its accumulate()"
        remedy = "detach what is carried on, as in hidden = hidden.detach(), and compute the rest in each accumulate()"
        raise MisuseError(f"{problem}, whose graph is freed: {remedy}") from error
    raise error


def run_window(
    engine: Engine,
    window: Window,
    loss: Loss,
    *,
    prefetch: int = 2,
    before_step: Callable[[], None] | None = None,
    backward: Callable[[Engine, Tensor], None] = backward,
) -> Outcome:
    """Computes the exact gradient of the window's global mean loss, and steps.

    The loss is a sum, and it is divided once: by the count of the whole window on all ranks.
    ``gradient_divide_factor`` undoes the engine's own averaging. Only a rank's last micro-step, the boundary,
    communicates gradients, except on fsdp2 with ``sync=every``, which reduces in each micro-step. Random numbers, such
    as those of dropout, are keyed by the micro-batch (``window.keys``).

    Args:
        engine: owns the model, the gradients and the step.
        window: its counts must be known.
        loss: gives a sum for each micro-batch.
        prefetch: micro-batches on the device at once, the one being computed included; at least 2.
        before_step: called between the last backward and the step, as to set the learning rate.
        backward: runs each micro-batch's, given what it goes back from.
    """
    sums, boundary, activity = LossSums(engine.device), len(window.micro_batches) - 1, engine.activity
    engine.begin_window(len(window.micro_batches))
    activity.phase = Phase.COPYING
    batches = on_device((micro.batch for micro in window.micro_batches), engine.device, prefetch)
    random = KeyedRandom(engine.device)
    for i, batch in enumerate(batches):
        activity.phase, activity.done = Phase.FORWARD, i
        with random.keyed(window.keys, i), engine.micro_step(sync=i == boundary):
            with engine.autocast():
                total = loss(engine.model, batch)
            own_counts, factor = window.micro_batches[i].counts, engine.gradient_divide_factor
            divided = normalize_loss(total, window.counts, factor, own_counts=own_counts)
            if i == boundary:
                activity.phase, activity.arrived_at = Phase.REDUCTION, perf_counter()
            else:
                activity.phase = Phase.BACKWARD
            if activity.watcher is not None:
                activity.watcher.before_backward(divided)
            backward(engine, divided)
        activity.phase = Phase.COPYING if i < boundary else Phase.STEP
        sums.add(total)
    if not window.micro_batches:
        activity.phase, activity.arrived_at = Phase.REDUCTION, perf_counter()
        engine.shadow_micro_step()  # the other ranks' reduction needs this rank's zeros
    activity.phase = Phase.STEP
    if before_step is not None:
        before_step()
    return sums.outcome(window.counts, engine.step())
