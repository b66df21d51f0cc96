"""Held-out sums and counts, exact on any number of ranks."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from distaccum.batch_plan import BatchPlan
from distaccum.data.loader import WindowLoader
from distaccum.data.source import Source
from distaccum.engines.base import Engine
from distaccum.loss import Loss, scores, to_device
from distaccum.precision.policy import PrecisionPolicy
from distaccum.world import World


@torch.no_grad()
def evaluate(
    engine: Engine, source: Source, loss: Loss, policy: PrecisionPolicy, world: World, *, micro_size: int
) -> dict[str, float]:
    """``eval_loss``, the loss's other scores, and ``eval_bits_per_byte`` for text: sums over all ranks, divided once.

    A collective. The model's training mode is restored. Samples are taken in the dataset's own order.
    """
    assert source.held_out is not None
    plan = BatchPlan(
        samples=len(source.held_out),
        global_size=micro_size * world.size,
        micro_size=micro_size,
        world_size=world.size,
    )
    loader = WindowLoader(source.held_out, plan, world, loss=loss, seed=None, source=source)
    engine.sync_buffers()
    model = engine.bare_model
    training = model.training
    model.eval()
    sums: dict[str, Tensor] = {}
    counted = 0
    for window in loader.windows(stop=plan.windows_per_epoch):
        counted += window.count
        for micro in window.micro_batches:
            with policy.autocast(engine.device):
                found = scores(loss, model, to_device(micro.batch, engine.device))
            for name, value in found.items():
                # fp64: a held-out set may hold more tokens than fp32 can count
                sums[name] = sums.get(name, 0.0) + value.double() * micro.weight
    model.train(training)
    totals = world.sum_(torch.stack(list(sums.values()))).tolist()  # host read: the evaluation's result
    result = {f"eval_{name}": total / max(1, counted) for name, total in zip(sums, totals, strict=True)}
    if source.bytes_per_token is not None:
        result["eval_bits_per_byte"] = result["eval_loss"] / math.log(2) / source.bytes_per_token
    return result
