"""``distaccum-verify``: what lies in a run directory, in words and in an exit code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from distaccum import CrossEntropy, DataSpec, Trainer
from distaccum.config.schema import RunConfig
from distaccum.train import verify


@pytest.fixture
def run(gloo_world: Any, tmp_path: Path) -> Path:
    """Two checkpoints, of steps 9 and 10."""
    config = {
        "batch": {"global_size": 4, "micro_size": 4},
        "schedule": {"_target_": "distaccum.train.schedules.Constant"},
        "trainer": {"max_steps": 10, "eval_every": 0, "log_every": 1},
        "checkpoint": {"every": 1, "keep": 2},
        "metrics": {"wandb": {"mode": "disabled"}},
    }
    data = DataSpec(train=[(torch.randn(4), torch.tensor(i % 3)) for i in range(16)])
    folder = tmp_path / "run"
    Trainer(nn.Linear(4, 3), CrossEntropy(), data, config=RunConfig.from_dict(config), run_dir=folder).fit()
    return folder


def _said(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    capsys.readouterr()
    monkeypatch.setattr("sys.argv", ["distaccum-verify", str(folder)])
    with pytest.raises(SystemExit) as stopped:
        verify.main()
    assert isinstance(stopped.value.code, int)
    return int(stopped.value.code), capsys.readouterr().out.splitlines()


def test_a_whole_run(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = _said(run, monkeypatch, capsys)
    assert code == 0
    assert [line.split()[0] for line in lines] == ["step-9", "step-10", "metrics.jsonl", "status.json", "resume=auto"]
    assert "whole: window 9, 0.0 MiB, saved by ddp on 1 ranks" in lines[0]
    assert "10 records, the last of step 10" in lines[2]
    assert lines[3].endswith("done at step 10")
    assert lines[4].endswith("continues step-10")


def test_a_damaged_one(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "checkpoints" / "step-10" / "model.safetensors").write_bytes(b"torn")
    (run / "checkpoints" / "damaged-step-7").mkdir()
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 1\xff')
    before = sorted(run.rglob("*"))
    code, lines = _said(run, monkeypatch, capsys)
    assert code == 1
    assert "DAMAGED: missing, added or changed: model.safetensors" in lines[1]
    assert "set aside" in lines[2]
    assert "DAMAGED: 1 lines are no JSON" in lines[3]
    assert lines[-1].endswith("continues step-9")
    assert sorted(run.rglob("*")) == before


def test_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert _said(tmp_path, monkeypatch, capsys)[0] == 2
