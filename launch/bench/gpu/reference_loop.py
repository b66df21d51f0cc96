"""The loop that is written by hand for one GPU, and that the Trainer's is measured against.

Source: A. Karpathy, nanoGPT, ``train.py`` (MIT): no DDP on one GPU, the next micro-batch on its way while this one is
computed, a GradScaler that only fp16 switches on, ``zero_grad(set_to_none=True)``. Model, loss and optimizer are those
of the run, so that the loops differ in nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, count
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from distaccum.data.loader import MicroBatchIds
from distaccum.distributed.world import World
from distaccum.train.components import TrainingComponents
from launch.bench.gpu.runs import tokens_of_window
from launch.bench.variant import Step


def batches(components: TrainingComponents, world: World) -> Iterator[Any]:
    """Micro-batches of the training data, epoch after epoch, from a ``DataLoader``; in pinned memory for a GPU."""
    ids = MicroBatchIds(components.plan, world.rank)
    loader = DataLoader(components.data.train, batch_sampler=ids, pin_memory=world.device.type == "cuda")

    def epochs() -> Iterator[DataLoader[Any]]:
        for epoch in count():
            ids.seek(epoch, 0)
            yield loader

    return chain.from_iterable(epochs())


def reference_loop(components: TrainingComponents, world: World) -> Step:
    """The loop of a run on one rank; compiled as a whole where the run compiles anything."""
    config, policy, device = components.config, components.policy, world.device
    model, loss, (optimizer,) = components.model.to(device).train(), components.loss, components.optimizers
    forward: nn.Module = model
    if config.compile.compiles:
        forward = torch.compile(model, backend=config.compile.backend, dynamic=False)  # type: ignore[assignment]
    scaler = torch.amp.GradScaler(device.type, enabled=policy.scales_loss)
    micro_steps, tokens = components.plan.items_of_window, tokens_of_window(config)
    given, updates = batches(components, world), count()
    rates = [group["lr"] for group in optimizer.param_groups]

    def following() -> tuple[Tensor, ...]:
        return tuple(part.to(device, non_blocking=True) for part in next(given))

    batch = following()

    def step() -> None:
        nonlocal batch
        factor = components.schedule(next(updates))
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor
        for _ in range(micro_steps):
            with policy.autocast(device):
                total = loss(forward, batch) / tokens
            batch = following()
            scaler.scale(total).backward()
        if config.optim.clip_norm is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), config.optim.clip_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    return step
