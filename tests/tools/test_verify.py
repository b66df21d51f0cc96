"""``distaccum verify``: what lies in a run directory, in words and in an exit code."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from distaccum import CrossEntropy, DataSpec, Trainer
from distaccum.checkpoint import files
from distaccum.checkpoint.store import CheckpointStore
from distaccum.errors import ConfigError
from distaccum.tools import verify
from distaccum.tools.history import newest_checkpoint
from distaccum.train import cli
from distaccum.train.owner import Holder
from distaccum.train.run_dir import RunDir
from tests.support.faults import has
from tests.support.runs import settings


@pytest.fixture
def run(gloo_world: Any, tmp_path: Path) -> Path:
    """Two checkpoints, of steps 9 and 10."""
    config = settings((4, 4), {"max_steps": 10, "eval_every": 0, "log_every": 1}, save=1, checkpoint={"keep": 2})
    data = DataSpec(train=[(torch.randn(4), torch.tensor(i % 3)) for i in range(16)])
    folder = tmp_path / "run"
    Trainer(nn.Linear(4, 3), CrossEntropy(), data, config=config, run_dir=folder).fit()
    return folder


def _said(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    capsys.readouterr()
    monkeypatch.setattr("sys.argv", ["distaccum verify", str(folder)])
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


def test_one_that_a_rollback_was_replacing_when_the_run_died(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = run / "checkpoints"
    shutil.rmtree(checkpoints / "step-9")
    (checkpoints / "step-10").rename(checkpoints / ".replaced-step-10")
    code, lines = _said(run, monkeypatch, capsys)
    assert code == 0
    assert lines[0].startswith("step-10 ")
    assert "whole: window 10" in lines[0]
    assert lines[-1].endswith("continues step-10")
    assert [path.name for path in checkpoints.glob("*step-*")] == [".replaced-step-10"]


@pytest.mark.fault("`history.json` tells of a checkpoint that is not there: it comes late (NFS), or not at all")
def test_a_checkpoint_that_the_history_tells_of(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, says: Callable[[str], None]
) -> None:
    path, hidden, waited = run / "checkpoints" / "step-10", run / "hidden", list[float]()
    path.rename(hidden)
    assert verify.inspect(run)[-1].text.startswith("continues step-9; history.json says that step 10 was saved, and it")

    def wait(seconds: float) -> None:
        waited.append(seconds)
        if sum(waited) > 3:
            hidden.rename(path)

    monkeypatch.setattr(files, "_LATE_S", (0.1, 0.4, 1.5))
    monkeypatch.setattr(files, "sleep", wait)
    found = [newest_checkpoint(CheckpointStore(path.parent, keep=2), RunDir(run)) for _ in range(2)]
    assert (found, sum(waited)) == ([path.with_name("step-9"), path], pytest.approx(4))
    says(*caplog.messages)


def _torn(run: Path) -> None:
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'[2]\n{"step": 1\xff')


def _all_bad(run: Path) -> None:
    for file in run.glob("checkpoints/*/state.json"):
        file.write_bytes(b"")


def _held(run: Path) -> None:
    (run / "owner.json").write_text(json.dumps(asdict(replace(Holder.here(), pid=2**22 + 1))))


NEWEST = "checkpoints/step-10"
DAMAGES: dict[str, tuple[Callable[[Path], object], int, str, str]] = {
    "cut short": (lambda run: os.truncate(run / NEWEST / "model.safetensors", 90), 1, "DAMAGED: missing", "step-9"),
    "a file missing": (lambda run: (run / NEWEST / "random-0.json").unlink(), 1, "DAMAGED: missing", "step-9"),
    "no manifest": (lambda run: (run / NEWEST / "manifest.json").unlink(), 1, "DAMAGED: no readable mani", "step-9"),
    "a list": (lambda run: (run / NEWEST / "manifest.json").write_text("[]"), 1, "json is no manifest", "step-9"),
    "null": (lambda run: (run / NEWEST / "manifest.json").write_text("null"), 1, "json is no manifest", "step-9"),
    "a file for a folder": (lambda run: (run / "checkpoints/step-11").touch(), 1, "step-11 ... DAMAGED", "step-10"),
    "a link": (lambda run: (run / "checkpoints/step-11").symlink_to("x"), 1, "step-11 ... DAMAGED", "step-10"),
    "half saved": (lambda run: (run / "checkpoints/.saving-step-11").mkdir(), 0, ".saving-step-11 ... is b", "step-10"),
    "set aside": (lambda run: (run / "checkpoints/damaged-step-7").mkdir(), 0, "damaged-step-7 ... set as", "step-10"),
    "a torn line": (_torn, 1, "10 records, the last of step 10; DAMAGED: 2 lines are no records", "step-10"),
    "a status": (lambda run: (run / "status.json").write_text("[]"), 1, "status.json ... DAMAGED", "step-10"),
    "a dead owner": (_held, 0, "owner.json ... which is gone: the next run takes it over", "step-10"),
    "a lock": (lambda run: (run / "owner.json").write_text("{}"), 1, "owner.json ... DAMAGED", "step-10"),
    "all bad": (_all_bad, 1, "refuses: resume=auto: ... has no checkpoint to resume from: 2 damaged", ""),
    "all gone": (lambda run: shutil.rmtree(run / "checkpoints"), 1, "refuses: ... empty or gone, and the run was", ""),
}


@pytest.mark.fault("`distaccum verify RUN` on any of these damages")
def test_every_damage_is_named(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], says: Callable[[str], None]
) -> None:
    """Records that are no objects were a traceback; the lock was not looked at, nor what a resume would do."""
    everything = ""
    for name, (act, code, words, continued) in DAMAGES.items():
        copied = run.with_name(name.replace(" ", "-"))
        shutil.copytree(run, copied)
        act(copied)
        before = sorted(copied.rglob("*"))
        found, lines = _said(copied, monkeypatch, capsys)
        said = "\n".join(lines)
        assert found == code, (name, said)
        assert has(words, said), (name, said)
        assert not continued or lines[-1].endswith(f"continues {continued}"), (name, said)
        assert sorted(copied.rglob("*")) == before
        everything += said
    says(everything)


@pytest.mark.fault("names of files with what a terminal obeys, or a path of 4,300 characters")
def test_names_that_a_terminal_obeys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "checkpoints" / "aside-step-1\x1b[2J\nstep-9  whole").mkdir(parents=True)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    assert any("aside-step-1?[2J?step-9  whole" in line for line in _said(tmp_path, monkeypatch, capsys)[1])
    long = "/".join(["d" * 200] * 22)
    with pytest.raises(ConfigError, match="cannot be written"):
        RunDir(tmp_path / long).make()
    assert len(list(cli._absent([f"hydra.run.dir={tmp_path}/{long}"]))) >= 21
    assert _said(tmp_path / long, monkeypatch, capsys) == (1, [])


def test_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert _said(tmp_path, monkeypatch, capsys)[0] == 2
