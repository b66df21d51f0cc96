"""Run by torchrun: evaluations alone by every engine, of held-out sets that leave the ranks with uneven batches."""

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from distaccum import CrossEntropy, DataSpec, Trainer, World
from tests.support.answers import give
from tests.support.runs import settings

SIZES = {"news": 7, "code": 3, "prose": 1}  # of at most 2: 4 batches, 3 of one sample, and one for both ranks


def samples(size: int) -> Any:
    return [(x, x[:3].argmax()) for x in torch.randn(size, 4, generator=torch.Generator().manual_seed(size))]


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3))


def evaluated(engine: dict[str, Any], folder: Path, *, max_steps: int, workers: int) -> dict[str, float]:
    data = DataSpec(train=samples(16), eval_dataset={name: samples(size) for name, size in SIZES.items()})
    trainer = {"max_steps": max_steps, "eval_every": 1, "num_workers": workers}
    config = settings((4, 2), trainer, engine=engine, schedule={})
    return Trainer(made(), CrossEntropy(), data, config=config, run_dir=folder).fit()


def in_fp64() -> dict[str, float]:
    model, found = made().double(), {}
    for name, size in SIZES.items():
        x, labels = (torch.stack(parts) for parts in zip(*samples(size), strict=True))
        logits: Tensor = model(x.double())
        found[f"eval_{name}_loss"] = nn.functional.cross_entropy(logits, labels).item()
        found[f"eval_{name}_accuracy"] = (logits.argmax(1) == labels).double().mean().item()
    return found


def main(world: World) -> dict[str, Any]:
    results: dict[str, Any] = {"fp64": in_fp64()}
    with tempfile.TemporaryDirectory() as folder:
        shared = Path(world.broadcast_str(folder))
        for name in sys.argv[2:]:
            engine: dict[str, Any] = {"name": name} | ({"stage": 3} if name == "deepspeed" else {})
            results[name] = evaluated(engine, shared / name, max_steps=0, workers=1)
            results[f"{name} trained"] = [
                evaluated(engine, shared / f"{name}-{workers}", max_steps=2, workers=workers) for workers in (0, 2)
            ]
        world.barrier()
    return results


if __name__ == "__main__":
    give(main)
