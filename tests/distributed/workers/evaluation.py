"""Run by torchrun: evaluations of held-out sets that leave ranks with less or nothing, and stops asked by one rank."""

import copy
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

from distaccum import DataSpec, Trainer, World
from distaccum.data.spec import WorkerOptions
from distaccum.losses.cross_entropy import CrossEntropy
from distaccum.train.callbacks import Callback, Run
from distaccum.train.evaluate import Evaluation
from tests.distributed.workers.evaluation_engines import samples
from tests.support.accumulators import over_sgd
from tests.support.answers import give
from tests.support.runs import settings


class OneRankStops(Callback):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_eval(self, run: Run, results: Mapping[str, float]) -> None:
        if run.progress.step == 4 and self.rank == 0:
            run.stop("rank 0 has seen enough")


def train(world: World, held_out: int, folder: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    source = DataSpec(train=samples(40), eval_dataset=samples(held_out), description="")
    config = settings((8, 3), {"max_steps": 100, "eval_every": 2}, schedule={})
    metrics: Any = {"acc": MulticlassAccuracy(num_classes=3, average="micro"), "auroc": MulticlassAUROC(num_classes=3)}
    if held_out < world.size:
        metrics = {}  # which need a sample on every rank
    trainer = Trainer(
        nn.Linear(4, 3),
        CrossEntropy(),
        source,
        config=config,
        callbacks=[OneRankStops(world.rank)],
        metrics=metrics,
        run_dir=folder,
    )
    return trainer.fit() | json.loads((folder / "status.json").read_text())


def of_fixed_weights(world: World, num_workers: int) -> dict[str, float]:
    torch.manual_seed(0)
    model, loss = nn.Linear(4, 3), CrossEntropy()
    reference = copy.deepcopy(model)
    acc = over_sgd(model, 0.1, (8, 3), count=loss.count, world=world)
    data = DataSpec(train=samples(40), eval_dataset=samples(23))
    evaluation = Evaluation(
        acc.engine, data, loss, world, micro_batch_size=3, workers=WorkerOptions(num_workers=num_workers)
    )
    x, labels = (torch.stack(parts) for parts in zip(*samples(23), strict=True))
    expected = nn.functional.cross_entropy(reference.double()(x.double()), labels)
    return {"fp64": expected.item(), **evaluation.run(), **evaluation.samples}


def stop_at_level_two(world: World) -> int:
    loss = CrossEntropy()
    acc = over_sgd(nn.Linear(4, 3), 0.1, (8, 3), count=loss.count, world=world)
    for _ in range(3):
        for window in acc.windows(samples(40)):
            acc.step(window, loss)
            if acc.progress.step == 2 and world.is_main:
                acc.stop()
    return acc.progress.step


def main(world: World) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        shared = Path(world.broadcast_str(folder))
        results: dict[str, Any] = {str(size): train(world, size, shared / str(size)) for size in (23, 2)}
        for number in (0, 2):
            results[f"{number} workers"] = of_fixed_weights(world, number)
        results["level 2"] = stop_at_level_two(world)
        world.barrier()
    return results


if __name__ == "__main__":
    give(main)
