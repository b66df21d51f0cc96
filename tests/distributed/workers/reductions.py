"""Run by torchrun: what a steady window sends, and how exact its gradient is, by accumulations and number formats."""

import json
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from distaccum.accumulation.step import run_window
from distaccum.config.engine import DDPConfig
from distaccum.config.precision import PrecisionConfig, ScalerConfig
from distaccum.data.counter import GlobalCounter
from distaccum.data.loader import MapWindowLoader
from distaccum.data.plan.batch import BatchPlan
from distaccum.distributed.environment import LaunchEnvironment
from distaccum.distributed.world import World, open_world
from distaccum.engines.context import EngineContext
from distaccum.engines.ddp.engine import DDPEngine
from distaccum.engines.ddp.reducer import BucketReducer
from distaccum.engines.ddp.stepper import WholeStepper
from distaccum.losses.cross_entropy import CrossEntropy
from distaccum.testing.counters import OperationCounter

COUNTED = ("gradient reductions", "gradient bytes", "other reductions", "other bytes", "other collectives")
WIDTH = 256  # a layer's weight is 256 KiB, so that buckets of 0.25 MiB hold one layer each
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LARGE = (80_000.0, 20_000.0)  # of each rank: fp16 ends at 65,504, and holds the average


def engine_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, world: World, dtype: str, config: DDPConfig, **options: Any
) -> DDPEngine:
    """That reduces in ``dtype``, of losses that are not scaled."""
    formats = PrecisionConfig(reduce_dtype=dtype, scaler=ScalerConfig(static_scale=1.0))
    context = EngineContext(engine=config, precision=formats, world_size=world.size, device=world.device, **options)
    reducer = BucketReducer(world, DTYPES[dtype])
    return DDPEngine(model, [optimizer], world, context, reducer=reducer, stepper=WholeStepper())


def count(world: World, accumulation: int, *, ragged: bool = False, dtype: str = "fp32") -> dict[str, int]:
    """Counts of the fourth window; a ``ragged`` one holds one sample, which rank 0 does not have."""
    micro = 2
    global_batch_size = accumulation * micro * world.size
    samples = 3 * global_batch_size + (1 if ragged else global_batch_size)
    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(WIDTH, generator=generator), torch.tensor(1)) for _ in range(samples)]
    loss = CrossEntropy()
    plan = BatchPlan(
        samples=len(data), global_batch_size=global_batch_size, micro_batch_size=micro, world_size=world.size, seed=0
    )
    assert plan.accumulation_steps == accumulation
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)])
    model.register_buffer("constant", torch.zeros(1000))  # must not travel with every window
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    engine = engine_of(model, optimizer, world, dtype, DDPConfig(bucket_cap_mb=0.25), clip_norm=1.0)
    windows = MapWindowLoader(data, plan, world).windows(0, 0, GlobalCounter(world, loss.count))
    for window in islice(windows, 3):
        run_window(engine, window, loss)
    with OperationCounter() as operations:
        window = next(windows)
        run_window(engine, window, loss)
    return {
        **{name: operations.counts[name] for name in COUNTED},
        "micro-batches": len(window.micro_batches),
        "buckets": len({p.grad.untyped_storage().data_ptr() for p in model.parameters() if p.grad is not None}),
        "parameter bytes": sum(p.nbytes for p in model.parameters()),
    }


class Product(nn.Module):
    """A model whose gradient is exactly the forward's argument."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.weight * gradient).sum()


def reduce(world: World, gradient: Tensor, dtype: str) -> Tensor:
    """The sum of the ranks' gradients, as the engine reduces it; in fp16 their average."""
    model = Product(gradient.numel())
    optimizer = torch.optim.SGD(model.parameters())
    engine = engine_of(model, optimizer, world, dtype, DDPConfig())
    with engine.micro_step(sync=True):
        engine.backward(engine.model(gradient))
    assert model.weight.grad is not None
    return model.weight.grad


def reduce_by_torch(gradient: Tensor) -> Tensor:
    """The average by torch's own hook for fp16."""
    model = Product(gradient.numel())
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, fp16_compress_hook)
    ddp(gradient).backward()
    assert model.weight.grad is not None
    return model.weight.grad


def worst_error(world: World, dtype: str) -> float:
    """The largest error of an element against fp64, in units of what rounding may do to it.

    Each rank's gradient, in fp16 its half, is rounded, and so is the sum: each to within half the format's epsilon of
    itself, or of the least normal number where it is smaller.
    """
    both = [torch.randn(100_000, generator=torch.Generator().manual_seed(rank)) for rank in range(world.size)]
    found = reduce(world, both[world.rank], dtype).double()
    parts = [gradient.double() / BucketReducer(world, DTYPES[dtype]).divisor for gradient in both]
    expected, limits = sum(parts), torch.finfo(DTYPES[dtype])
    allowed = sum(limits.eps / 2 * part.abs().clamp(min=limits.tiny) for part in (*parts, expected))
    return ((found - expected).abs() / allowed).max().item()


def main() -> None:
    ranks = LaunchEnvironment.from_environment()
    with open_world(ranks, ranks.store(), torch.device("cpu")) as world:
        counts = {str(accumulation): count(world, accumulation) for accumulation in (1, 4, 16)}
        counts["ragged"] = count(world, 4, ragged=True)
        large = torch.full((8,), LARGE[world.rank])
        found = {
            "counts": counts,
            "by dtype": {dtype: count(world, 4, dtype=dtype) for dtype in DTYPES},
            "worst error": {dtype: worst_error(world, dtype) for dtype in DTYPES},
            "large": {dtype: reduce(world, large, dtype).tolist() for dtype in DTYPES},
            "large, torch's hook": reduce_by_torch(large).tolist(),
        }
        (Path(sys.argv[1]) / f"{world.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
