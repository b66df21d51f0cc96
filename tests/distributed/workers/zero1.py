"""Run by torchrun: optimizer state dealt out over ranks, beside the same optimizers on every rank.

``zero1.py RESULT``: a JSON file to write.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, Optimizer

from distaccum import Accumulator, DataSpec, World
from tests.distributed.workers.fsdp2 import Make, Model, Squares, samples
from tests.support.answers import give

GLOBAL_SIZE, WINDOWS = 6, 5


def one(kind: Any, **options: Any) -> tuple[nn.Module, list[Optimizer]]:
    torch.manual_seed(3)
    model = Model(16)
    return model, [kind(model.parameters(), **options)]


def several(fused: bool) -> tuple[nn.Module, list[Optimizer]]:
    """Two optimizers, one of groups with settings of their own."""
    model, _ = one(SGD)
    groups = [{"params": model.blocks[0].parameters()}, {"params": model.blocks[1].parameters(), "weight_decay": 0.5}]
    rest = [*model.blocks[2].parameters(), *model.enter.parameters(), *model.leave.parameters()]
    return model, [AdamW(groups, lr=0.05, fused=fused), SGD(rest, lr=0.02, momentum=0.9, fused=fused)]


def few() -> tuple[nn.Module, list[Optimizer]]:
    """An optimizer of one parameter, of which every rank but one steps none."""
    model, _ = one(SGD)
    first, *rest = model.parameters()
    return model, [AdamW([first], lr=0.05, fused=True), AdamW(rest, lr=0.05)]


def frozen() -> tuple[nn.Module, list[Optimizer]]:
    """Some of what the optimizer holds is not trained."""
    model, optimizers = one(AdamW, lr=0.05, fused=True)
    for parameter in (*model.enter.parameters(), *model.blocks[1].parameters()):
        parameter.requires_grad_(False)
    return model, optimizers


MODELS: dict[str, Make] = {
    "AdamW": partial(one, AdamW, lr=0.05, fused=False, foreach=False),
    "AdamW, foreach": partial(one, AdamW, lr=0.05, foreach=True),
    "AdamW, fused": partial(one, AdamW, lr=0.05, fused=True),
    "AdamW, amsgrad": partial(one, AdamW, lr=0.05, amsgrad=True),
    "SGD with momentum": partial(one, SGD, lr=0.05, momentum=0.9),
    "SGD with momentum, fused": partial(one, SGD, lr=0.05, momentum=0.9, dampening=0.3, fused=True),
    "Adafactor": partial(one, Adafactor, lr=0.05),
    "several": partial(several, False),
    "several, fused": partial(several, True),
    "few": few,
    "frozen": frozen,
}


def size_of(optimizers: Iterable[Optimizer]) -> int:
    states = (state for optimizer in optimizers for state in optimizer.state.values())
    return sum(value.nbytes for state in states for value in state.values() if isinstance(value, Tensor))


def trained(make: Make, engine: str, world: World, **options: Any) -> dict[str, Any]:
    """An epoch; the weights after each window are compared over the ranks."""
    model, optimizers = make()
    acc = Accumulator(
        model,
        optimizers,
        global_batch_size=GLOBAL_SIZE,
        micro_batch_size=1,
        count=Squares().count,
        world=world,
        engine=engine,
        **options,
    )
    data: Any = samples(GLOBAL_SIZE * WINDOWS - 5)  # the last window is of one sample
    alike = True
    for window in acc.windows(DataSpec(train=data, eval_dataset=None, description="", shuffle=False)):
        acc.step(window, Squares())
        mine = torch.cat([p.detach().flatten() for p in model.parameters()])
        everyone = [torch.empty_like(mine) for _ in range(world.size)]
        dist.all_gather(everyone, mine)
        alike = alike and all(torch.equal(mine, other) for other in everyone)
    return {
        "weights": mine,
        "alike": alike,
        "bytes": size_of(optimizers),
        "held": [len(optimizer.state) for optimizer in optimizers],
    }


def main() -> None:
    world = World.join()
    found: dict[str, Any] = {}
    for name, make in MODELS.items():
        for clip in ({}, {"clip_norm": 0.3}):
            whole, dealt = (trained(make, engine, world, **clip) for engine in ("ddp", "zero1"))
            dealt["same"] = torch.equal(dealt.pop("weights"), whole.pop("weights"))
            found[f"{name}, clipped" if clip else name] = {"ddp": whole, "zero1": dealt}
    sizes = [p.numel() for p in Model(16).parameters()]
    give({"ranks": world.all_gather_object(found), "largest": max(sizes), "total": sum(sizes)}, world)


if __name__ == "__main__":
    main()
