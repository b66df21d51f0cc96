"""A run leaves its report and what it ran on, however it ends; neither of them can end it."""

from __future__ import annotations

import json
import logging
import platform
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import distaccum
from distaccum import CheckpointConfig, MetricsConfig, RunConfig, TrainerConfig, WandbConfig
from distaccum.distributed.world import World
from distaccum.errors import NonFiniteError
from distaccum.losses.cross_entropy import CrossEntropy
from distaccum.train.trainer import Trainer
from tests.tools.report.files import Page

DATA = torch.utils.data.TensorDataset(torch.randn(12, 4), torch.arange(12) % 3)


def _fit(folder: Path, *, steps: int = 4, model: nn.Module | None = None, report: bool = True, **settings: Any) -> None:
    config = RunConfig(
        trainer=TrainerConfig(log_every=1, eval_every=0, **settings),
        checkpoint=CheckpointConfig(every=2),
        metrics=MetricsConfig(console=False, report=report, wandb=WandbConfig(mode="disabled")),
    )
    Trainer(
        model or nn.Linear(4, 3),
        CrossEntropy(),
        DATA,
        global_batch_size=4,
        micro_batch_size=2,
        max_steps=steps,
        resume="auto",
        config=config,
        run_dir=folder,
    ).fit()


def _page(folder: Path) -> Page:
    return Page((folder / "report.html").read_text())


def test_a_run_leaves_its_report_and_what_it_ran_on(
    gloo_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["distaccum train", "a=b c", "x.token=canary"])
    _fit(tmp_path)
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    (run,) = _page(tmp_path).data["runs"]
    assert run["y"]["loss"] == [one["loss"] for one in records]
    assert len(records) == 4
    assert "done" in _page(tmp_path).rows("runs")[tmp_path.name]
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert environment["config"]["batch"]["global_size"] == 4
    (start,) = environment["starts"]
    assert (start["step"], start["window"], start["before"], start["ranks"]) == (0, 0, None, 1)
    assert start["command"] == "distaccum train 'a=b c' x.token=<redacted>"
    assert start["host"] == platform.node()
    assert start["versions"]["torch"] == torch.__version__
    assert start["versions"]["distaccum"] == distaccum.__version__

    _fit(tmp_path, steps=6)
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert environment["starts"][0] == start
    again = environment["starts"][1]
    assert (again["step"], again["before"]) == (4, {"state": "done", "step": 4, "reason": ""})
    (mark,) = (mark for mark in _page(tmp_path).data["runs"][0]["marks"] if mark["kind"] == "start")
    assert mark["at"][0] == 4


class Breaks(nn.Linear):
    """Its output is NaN from the third forward on."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.forwards = 0

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.forwards += self.training
        return super().forward(batch) * (float("nan") if self.forwards > 4 else 1.0)


def test_a_run_that_fails_leaves_its_report(gloo_world: World, tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError):
        _fit(tmp_path, model=Breaks(), verify="never")
    reason = json.loads((tmp_path / "status.json").read_text())["reason"]
    found = _page(tmp_path)
    assert reason.startswith("rank 0: NonFiniteError")
    assert f"failed at step 2. {reason}" in " ".join(found.texts).replace("  ", " ")
    assert found.data["runs"][0]["bad"]["loss"] == [[2, "NaN"]]
    assert [mark["kind"] for mark in found.data["runs"][0]["marks"]] == ["checkpoint", "skip"]


def test_a_report_that_cannot_be_written_is_a_warning(
    gloo_world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "report.html" / "in the way").mkdir(parents=True)
    with caplog.at_level(logging.WARNING):
        _fit(tmp_path)
    (said,) = (one.getMessage() for one in caplog.records if "report.html" in one.getMessage())
    assert said.startswith(f"{tmp_path / 'report.html'} is not written: IsADirectoryError")
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "done"
    _fit(tmp_path / "none", report=False)
    assert not (tmp_path / "none" / "report.html").exists()
    assert (tmp_path / "none" / "environment.json").is_file()
