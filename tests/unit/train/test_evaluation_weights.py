"""The Trainer evaluates and saves the weights that a schedule-free optimizer averages, and gives the model back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from distaccum import DataSpec, RunConfig, Trainer
from distaccum.distributed.world import World
from tests.support.commands import metrics
from tests.support.schedule_free import ScheduleFree

DATA: Any = list(torch.randn(16, 3, generator=torch.Generator().manual_seed(0)).unbind())
SPEC = DataSpec(train=DATA, eval_dataset=DATA[:4], description="in order", shuffle=False)


class Loss:
    def count(self, batch: Tensor) -> int:
        return len(batch)

    def __call__(self, model: nn.Module, batch: Tensor) -> Tensor:
        total: Tensor = (model(batch) - 1).square().sum()
        return total


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 1)


def _fit(model: nn.Module, optimizer: Any, run_dir: Path, **options: Any) -> None:
    config = RunConfig.from_dict(
        {
            "schedule": {"_target_": "distaccum.train.schedules.Constant"},
            "optim": {"clip_norm": None},
            "trainer": {"log_every": 1, "eval_every": 2},
            "checkpoint": {"every": 2, "keep": 0},
            "metrics": {"console": False, "wandb": {"mode": "disabled"}},
        }
    )
    sizes: Any = {"global_batch_size": 4, "micro_batch_size": 2, "max_steps": 4}
    Trainer(model, Loss(), SPEC, optimizer=optimizer, run_dir=run_dir, config=config, **(sizes | options)).fit()


def _averages(steps: int) -> nn.Module:
    model = _model()
    optimizer = ScheduleFree(model.parameters(), lr=0.1)
    optimizer.train()
    for k in range(steps):
        optimizer.zero_grad()
        (Loss()(model, torch.stack(DATA[4 * k : 4 * k + 4])) / 4).backward()
        optimizer.step()
    optimizer.eval()
    return model


def test_a_schedule_free_run_evaluates_and_saves_its_averages(gloo_world: World, tmp_path: Path) -> None:
    model = _model()
    _fit(model, ScheduleFree(model.parameters(), lr=0.1), tmp_path)
    for step in (2, 4):
        expected = _averages(step)
        loss = Loss()(expected, torch.stack(DATA[:4])).item() / 4
        assert metrics(tmp_path)[step - 1]["eval_loss"] == pytest.approx(loss, rel=1e-5)
        saved = load_file(tmp_path / "checkpoints" / f"step-{step}" / "model.safetensors")
        torch.testing.assert_close(saved["weight"], expected.weight.data, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(model.weight, expected.weight)  # and so does the model that is left
    again = _model()
    options = {"resume": str(tmp_path / "checkpoints" / "step-2")}
    _fit(again, ScheduleFree(again.parameters(), lr=0.1), tmp_path / "resumed", **options)
    assert torch.equal(again.weight, model.weight)


def test_a_model_is_trained_further_by_another_trainer(gloo_world: World, tmp_path: Path) -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for k in range(2):
        _fit(model, optimizer, tmp_path / str(k))
    model.zero_grad()
    optimizer.zero_grad()
    Loss()(model, torch.stack(DATA)).backward()
    optimizer.step()
