"""Run by torchrun: what a loss and a callback log, and metrics that are vectors and matrices; the rate is 0."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from distaccum import Callback, DataSpec, EarlyStopping, RunConfig, Trainer
from distaccum.accumulation.step import Outcome
from distaccum.train.callbacks import Run

CLASSES = ["cat", "dog", "owl"]


class Named(list[Any]):
    """A dataset that names its classes, as torchvision's do."""

    classes = CLASSES


def samples(size: int, seed: int) -> Named:
    """Vectors of 4, and which of their first three numbers is the largest."""
    x = torch.randn(size, 4, generator=torch.Generator().manual_seed(seed))
    return Named((row, row[:3].argmax()) for row in x)


class Logging:
    """Logs what is right, in all and of the owls: a name that a micro-batch without one does not log."""

    def count(self, batch: Any) -> int:
        return len(batch[1])

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        right = model(x).argmax(1) == y
        logged = {"right": (right.sum(), len(y)), "never": (1.0, 0)}
        if (owls := y == CLASSES.index("owl")).any():
            logged["right_owls"] = (right[owls].sum(), owls.sum())
        return nn.functional.cross_entropy(model(x), y, reduction="sum"), logged

    def predictions(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        return model(batch[0]), batch[1]


class Own(Callback):
    """Logs as each rank's own, and by W&B."""

    def on_update(self, run: Run, outcome: Outcome) -> None:
        assert len(run.optimizers) == 1
        norm = torch.stack([one.square().sum() for one in run.model.parameters()]).sum().sqrt()
        run.log({"squared": run.progress.step**2, "norm": norm, "rank": int(torch.distributed.get_rank())})
        if torch.distributed.get_rank() == 0:
            import wandb  # noqa: PLC0415  the test imports this module

            assert wandb.run is not None
            wandb.log({"theirs": run.progress.step})

    def on_eval(self, run: Run, results: Mapping[str, float]) -> None:
        run.log({"twice": 2 * results["eval_loss"]})


def main(folder: str, numerics: str) -> None:
    """Trains four windows of five samples, the last on one rank alone."""
    from torchmetrics.classification import MulticlassConfusionMatrix, MulticlassF1Score  # noqa: PLC0415

    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    values = {
        "trainer": {"log_every": 2, "eval_every": 2},
        "checkpoint": {"best": "eval_f1/dog"},
        "numerics": numerics,
        "batch": {"virtual_ranks": 2},
        "metrics": {"console": False, "tensorboard": {"enabled": True}, "wandb": {"mode": "offline"}},
    }
    trainer = Trainer(
        model,
        Logging(),
        DataSpec(train=samples(18, 0), eval_dataset=samples(23, 1), shuffle=False),
        global_batch_size=5,
        micro_batch_size=2,
        max_steps=4,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        metrics={
            "f1": MulticlassF1Score(num_classes=3, average=None),
            "confusion": MulticlassConfusionMatrix(num_classes=3),
        },
        callbacks=[Own(), EarlyStopping(metric="eval_f1/cat", patience=50)],
        run_dir=folder,
        config=RunConfig.from_dict(values),
    )
    trainer.fit()
    tested = trainer.test(samples(23, 1))
    record = json.loads(Path(folder, "metrics.jsonl").read_text().splitlines()[-1])
    assert tested["test_confusion"] == record["eval_confusion"]
    assert tested["test_f1/owl"] == record["eval_f1/owl"]


if __name__ == "__main__":
    main(*sys.argv[1:])
