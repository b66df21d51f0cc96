"""``batch.micro_size=auto`` of a Trainer, where there is nothing to find."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

from distaccum import CrossEntropy, DataSpec, RunConfig, Trainer
from distaccum.distributed.world import World


def samples(number: int) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    return [(x, x[:3].argmax()) for x in torch.randn(number, 4, generator=generator)]


class Stream(IterableDataset[Any]):
    """Each sample once."""

    def __iter__(self) -> Any:
        return iter(samples(40))


def trained(folder: Path, model: nn.Module, data: Any) -> dict[str, Any]:
    """The plan of a run."""
    config = RunConfig.from_dict(
        {
            "batch": {"global_size": 8, "micro_size": "auto"},
            "schedule": {"_target_": "distaccum.train.schedules.Constant"},
            "trainer": {"max_steps": 2, "eval_every": 0, "verify": "never"},
            "checkpoint": {"every": 0},
            "metrics": {"console": False, "wandb": {"mode": "disabled"}},
        }
    )
    Trainer(model, CrossEntropy(), DataSpec(train=data, eval_dataset=None), config=config, run_dir=folder).fit()
    found: dict[str, Any] = json.loads((folder / "plan.json").read_text())
    return found


@pytest.mark.filterwarnings("ignore::distaccum.errors.BatchStatisticsWarning")
@pytest.mark.parametrize(
    ("model", "data", "why"),
    [
        (
            nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)),
            samples(40),
            "1 takes statistics of a micro",
        ),
        (nn.Linear(4, 3), Stream(), "a stream gives its items once, so that nothing is rehearsed"),
    ],
    ids=["batch norm", "stream"],
)
def test_the_size_stays_what_it_is(model: nn.Module, data: Any, why: str, gloo_world: World, tmp_path: Path) -> None:
    plan = trained(tmp_path, model, data)
    assert plan["micro_size"] == 8
    assert plan["memory"]["reason"].startswith(f"micro 8: {why}")
    assert "trials" not in plan["memory"]


def test_elsewhere_it_is_found(gloo_world: World, tmp_path: Path) -> None:
    plan = trained(tmp_path, nn.Linear(4, 3), samples(40))
    assert plan["micro_size"] == plan["memory"]["micro_size"]
    assert plan["memory"]["trials"][0]["size"] == 1
