"""Run by torchrun: counts the collectives of one steady window at several accumulations."""

from __future__ import annotations

import json
import sys
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from distaccum.batch_plan import BatchPlan
from distaccum.data.loader import WindowLoader
from distaccum.data.source import as_source
from distaccum.engines.ddp import DDPEngine
from distaccum.loss import CrossEntropy
from distaccum.precision.policy import POLICIES
from distaccum.window import run_window
from distaccum.world import Ranks, World, open_world

WIDTH = 256  # a layer's weight is 256 KiB, so that buckets of 0.25 MiB hold one layer each


class Collectives(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function)
        if name.startswith("c10d.allreduce_"):
            tensor: Tensor = args[0][0]
            kind = "gradient" if tensor.is_floating_point() else "count"
            self.counts[f"{kind} reductions"] += 1
            self.counts[f"{kind} bytes"] += tensor.nbytes
        elif name.startswith("c10d."):
            self.counts["other collectives"] += 1
        return function(*args, **(kwargs or {}))


def count(world: World, accumulation: int) -> dict[str, int]:
    micro = 2
    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(WIDTH, generator=generator), torch.tensor(1)) for _ in range(256)]
    source, loss = as_source(data), CrossEntropy()
    plan = BatchPlan(
        samples=len(data), global_size=accumulation * micro * world.size, micro_size=micro, world_size=world.size
    )
    assert plan.accumulation_steps == accumulation
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)])
    model.register_buffer("constant", torch.zeros(1000))  # must not travel with every window
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    engine = DDPEngine(model, optimizer, world, bucket_cap_mb=0.25)
    windows = WindowLoader(source.train, plan, world, loss=loss, seed=0, source=source).windows()
    for window in islice(windows, 3):
        run_window(engine, window, loss, POLICIES["fp32"], clip_norm=1.0)
    with Collectives() as collectives:
        run_window(engine, next(windows), loss, POLICIES["fp32"], clip_norm=1.0)
    return {
        "other collectives": 0,
        **collectives.counts,
        "buckets": len({p.grad.untyped_storage().data_ptr() for p in model.parameters() if p.grad is not None}),
        "parameter bytes": sum(p.nbytes for p in model.parameters()),
    }


if __name__ == "__main__":
    ranks = Ranks.from_environment()
    with open_world(ranks, ranks.store(), torch.device("cpu")) as world:
        counts = {accumulation: count(world, accumulation) for accumulation in (1, 4, 16)}
        if world.rank == 1:
            Path(sys.argv[1]).write_text(json.dumps(counts))
