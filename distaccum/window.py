"""One optimizer step over one accumulation window: the whole update on one screen, whatever the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distaccum.engines.base import Engine
from distaccum.loss import Loss, to_device
from distaccum.precision.policy import PrecisionPolicy


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one forward/backward takes. ``weight`` is 0 for a stand-in on a rank that has nothing left, else 1."""

    batch: Any
    count: int
    weight: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """The micro-batches of one optimizer step on one rank, and what the step counts over all ranks."""

    index: int  # over all epochs
    epoch: int
    samples: int  # over all ranks
    count: int  # over all ranks: what the loss averages over
    micro_batches: Sequence[MicroBatch]
    data_wait_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What an attempt did. Tensors are 0-dim and stay on the device until somebody logs them.

    ``loss_sum`` is this rank's share; ``grad_norm`` (of the global gradient, before clipping) and ``finite`` are the
    same on every rank.
    """

    loss_sum: Tensor
    grad_norm: Tensor
    finite: Tensor


def run_window(
    engine: Engine, window: Window, loss: Loss, policy: PrecisionPolicy, *, clip_norm: float | None
) -> Outcome:
    """Computes the exact gradient of the window's global mean loss, and steps.

    The loss is a sum, and it is divided once: by the count of the whole window on all ranks. ``averages_over`` undoes
    the engine's own averaging. Only the last micro-step, the boundary, communicates gradients.
    """
    assert window.count > 0
    share = engine.averages_over / window.count
    boundary = len(window.micro_batches) - 1
    loss_sum = torch.zeros((), device=engine.device)
    for i, micro in enumerate(window.micro_batches):
        batch = to_device(micro.batch, engine.device)
        with engine.micro_step(sync=i == boundary):
            with policy.autocast(engine.device):
                total = loss(engine.model, batch)
            engine.backward(total * (share * micro.weight))
        if micro.weight:
            loss_sum = loss_sum + total.detach()
    step = engine.step(clip_norm)
    return Outcome(loss_sum=loss_sum, grad_norm=step.grad_norm, finite=step.finite)
