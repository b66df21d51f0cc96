"""A run leaves its report and what it ran on, however it ends; neither of them can end it."""

import importlib
import json
import logging
import platform
import sys
from collections.abc import Callable
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


def _imported(folder: Path, forward: str, *, helper: str = "x") -> nn.Module:
    """A model that is written in ``own_model.py``, which uses ``own_helper.py``, as a new process would import it."""
    (folder / "own_helper.py").write_text(f"def scaled(x):\n    return {helper}\n")
    code = "from torch import nn\nfrom own_helper import scaled\nclass Own(nn.Linear):\n    def forward(self, x):\n"
    (folder / "own_model.py").write_text(f"{code}        return {forward}\n")
    importlib.invalidate_caches()
    for name in ("own_model", "own_helper"):
        sys.modules.pop(name, None)
    return importlib.import_module("own_model").Own(4, 3)  # type: ignore[no-any-return]


@pytest.mark.fault("the code of the model, or of what it uses, the commit, device, GPUs or torch")
def test_what_has_changed_beside_the_settings_is_told(
    gloo_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any, says: Callable[[str], None]
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    file, doubled = tmp_path / "environment.json", "2 * super().forward(x)"

    def resumed(steps: int, model: nn.Module, versions: dict[str, str] | None = None, **before: Any) -> list[str]:
        """What is said of changes in a run whose starts had been noted with ``before``."""
        caplog.clear()
        if before:
            starts = json.loads(file.read_text())["starts"]
            new = [one | before | {"versions": one["versions"] | (versions or {})} for one in starts]
            file.write_text(json.dumps({"starts": new}))
        _fit(tmp_path, steps=steps, model=model, report=False)
        return [one.getMessage() for one in caplog.records if one.getMessage().startswith("since step")]

    said = resumed(4, _imported(tmp_path, "scaled(super().forward(x))")) + resumed(5, _imported(tmp_path, doubled))
    other = _imported(tmp_path, f"{doubled}  # as before", helper="x / 2")
    said += resumed(6, other, git_commit="abcdef")
    said += resumed(8, other, {"torch": "1.0", "system": "another"}, device="a card", gpus=8)
    says("\n".join(said))
    file.write_text('{"starts": [3, {"step": "x", "code": 7, "versions": []}]}')
    said += resumed(9, other)
    assert len(said) == 3
