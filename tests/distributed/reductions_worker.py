"""Run by torchrun: counts the collectives of one steady window at several accumulations, and of a ragged one."""

from __future__ import annotations

import json
import sys
from itertools import islice
from pathlib import Path

import torch
from torch import nn

from distaccum.batch_plan import BatchPlan
from distaccum.data.loader import PlannedFeed
from distaccum.data.tally import Tally
from distaccum.engines.ddp import DDPEngine
from distaccum.loss import CrossEntropy
from distaccum.testing.counters import Operations
from distaccum.window import run_window
from distaccum.world import Ranks, World, open_world

COUNTED = ("gradient reductions", "gradient bytes", "other reductions", "other bytes", "other collectives")
WIDTH = 256  # a layer's weight is 256 KiB, so that buckets of 0.25 MiB hold one layer each


def count(world: World, accumulation: int, *, ragged: bool) -> dict[str, int]:
    """Of the fourth window; where it is ``ragged`` it holds one sample, and rank 0 has none of it."""
    micro = 2
    global_size = accumulation * micro * world.size
    samples = 3 * global_size + (1 if ragged else global_size)
    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(WIDTH, generator=generator), torch.tensor(1)) for _ in range(samples)]
    loss = CrossEntropy()
    plan = BatchPlan(samples=len(data), global_size=global_size, micro_size=micro, world_size=world.size, seed=0)
    assert plan.accumulation_steps == accumulation
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)])
    model.register_buffer("constant", torch.zeros(1000))  # must not travel with every window
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    engine = DDPEngine(model, optimizer, world, clip_norm=1.0, bucket_cap_mb=0.25)
    windows = PlannedFeed(data, plan, world).windows(0, 0, Tally(world, loss.count))
    for window in islice(windows, 3):
        run_window(engine, window, loss)
    with Operations() as operations:
        window = next(windows)
        run_window(engine, window, loss)
    return {
        **{name: operations.counts[name] for name in COUNTED},
        "micro-batches": len(window.micro_batches),
        "buckets": len({p.grad.untyped_storage().data_ptr() for p in model.parameters() if p.grad is not None}),
        "parameter bytes": sum(p.nbytes for p in model.parameters()),
    }


if __name__ == "__main__":
    ranks = Ranks.from_environment()
    with open_world(ranks, ranks.store(), torch.device("cpu")) as world:
        counts = {str(accumulation): count(world, accumulation, ragged=False) for accumulation in (1, 4, 16)}
        counts["ragged"] = count(world, 4, ragged=True)
        (Path(sys.argv[1]) / f"{world.rank}.json").write_text(json.dumps(counts))
