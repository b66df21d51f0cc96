"""Run by torchrun: what a Trainer does with its model after a run, by every engine, on uneven numbers of samples."""

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

from distaccum import CrossEntropy, DataSpec, Trainer, World
from distaccum.errors import PeerError
from tests.distributed.workers.evaluation_engines import samples
from tests.support.answers import give
from tests.support.runs import settings


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8).eval(), nn.Dropout(0.5), nn.Linear(8, 3))


def trainer(engine: dict[str, Any], folder: Path, steps: int) -> Trainer:
    kept = {"keep": 1, "best": "eval_loss", "mode": "max"}  # of the first step: it learns
    stated: Any = {"checkpoint": kept, "optim": {"lr": 0.05}, "engine": engine, "resume": "auto"}
    config = settings((4, 2), {"max_steps": steps, "eval_every": 1}, save=1, **stated)
    data = DataSpec(train=samples(16), eval_dataset=samples(50))
    return Trainer(made(), CrossEntropy(), data, config=config, run_dir=folder)


@torch.no_grad()
def away(one: Trainer, checkpoint: Path) -> float:
    """How far all is from what the checkpoint's weights give in fp64, on one process: 7 samples, in batches of 2."""
    model, data = made().eval(), samples(7)
    model.load_state_dict({k: v for file in checkpoint.glob("model*.safetensors") for k, v in load_file(file).items()})
    x, labels = torch.stack([pair[0] for pair in data]), torch.stack([pair[1] for pair in data])
    logits = model.double()(x.double())
    found: list[Tensor] = [
        one.predict(data) - logits,
        one.predict(DataLoader(x, batch_size=3)) - logits,  # without labels
        one.predict(data, lambda model, batch: {"x": batch[0]})["x"] - x,
    ]
    for size in (7, 1):
        tested, rows = one.test({"near": data[:size]}), logits[:size]
        found += [nn.functional.cross_entropy(rows, labels[:size]) - tested["test_near_loss"]]
        found += [(rows.argmax(1) == labels[:size]).double().mean() - tested["test_near_accuracy"]]
    return max(float(part.abs().max()) for part in found)


def failing(one: Trainer, world: World) -> str:
    """What each rank says of a function that fails on the last one, which catches it and predicts on."""
    last = world.rank == world.size - 1
    try:
        one.predict(samples(7), lambda model, batch: 1 / 0 if last else model(batch[0]))
    except (ZeroDivisionError, PeerError) as error:
        return "; ".join(world.all_gather_names([f"{type(error).__name__}: {error}"]))
    return ""


def left_alone(folder: Path) -> None:
    """One rank fails in a forward of shards, and catches it."""
    one = trainer({"name": "fsdp2"}, folder, 3)
    one.fit()
    try:
        one.predict(samples(7), lambda model, batch: model(batch[0]) if one.is_main else 1 / 0)
    except ZeroDivisionError:
        time.sleep(100)


def main(world: World) -> dict[str, Any]:
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in sys.argv[2:]:
            engine: dict[str, Any] = {"name": name.partition("-")[0]}
            engine |= {"stage": int(name[-1])} if name.startswith("deepspeed") else {}
            run, results[name] = Path(world.broadcast_str(folder)) / name, {}
            for steps in (3, 4):  # the second goes on with the first
                one = trainer(engine, run, steps)
                one.fit()
                if name == "zero1":
                    failed = failing(one, world)
                    assert "ZeroDivisionError: division by zero" in failed, failed
                    assert failed.count("PeerError: rank 1: ZeroDivisionError: division by zero (while ") == 1, failed
                results[name][f"step-{steps}"] = away(one, run / "checkpoints" / f"step-{steps}")
                best = one.load_best()
                results[name][f"{best.name} of {steps}"] = away(one, best)
        world.barrier()
    return results


if __name__ == "__main__":
    give(main) if sys.argv[2:] else left_alone(Path(sys.argv[1]))
