"""What NFS does to a run: replies that are lost, files that come late, handles that are stale."""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from distaccum import CrossEntropy, DataSpec, Trainer
from distaccum.checkpoint import files, state
from distaccum.checkpoint.files import HashingWriter
from distaccum.checkpoint.store import MANIFEST, CheckpointStore
from distaccum.train.run_log import RunLog
from tests.support.runs import settings

DATA = [(torch.full((4,), i / 16), torch.tensor(i % 3)) for i in range(16)]
NFS = pytest.mark.fault("NFS: replies to mkdir, rename and unlink are lost, a file comes a second late,")
GONE, THERE = FileNotFoundError(errno.ENOENT, "injected"), FileExistsError(errno.EEXIST, "injected")
STALE = OSError(errno.ESTALE, "Stale file handle")


def _train(folder: Path, steps: int) -> list[int]:
    """The steps of all records."""
    trainer = {"max_steps": steps, "eval_every": 0, "log_every": 1}
    config = settings((4, 4), trainer, save=1, checkpoint={"keep": 2}, resume="auto")
    torch.manual_seed(0)
    Trainer(nn.Linear(4, 3), CrossEntropy(), DataSpec(train=DATA), config=config, run_dir=folder).fit()
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@NFS
@pytest.mark.parametrize(("call", "told"), [("mkdir", THERE), ("replace", GONE), ("unlink", GONE), ("rmdir", GONE)])
@pytest.mark.usefixtures("gloo_world")
def test_a_reply_that_is_lost_is_no_error(
    call: str, told: OSError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The request is repeated, and told that there is something already, or nothing."""
    weights, lost, real = "checkpoints/step-4/model.safetensors", list[str](), getattr(os, call)
    assert _train(tmp_path / "whole", 4) == [1, 2, 3, 4]

    def act(*paths: Any, **named: Any) -> None:
        real(*paths, **named)
        lost.append(call)
        raise told

    monkeypatch.setattr(files, "sleep", float)
    with monkeypatch.context() as patch:
        patch.setattr(os, call, act)
        assert _train(tmp_path / "run", 3) == [1, 2, 3]
        (tmp_path / "run/checkpoints/step-3").rename(tmp_path / "run/checkpoints/.replaced-step-3")  # as of the dead
        assert _train(tmp_path / "run", 4) == [1, 2, 3, 4]
    assert call in lost
    assert (tmp_path / "run" / weights).read_bytes() == (tmp_path / "whole" / weights).read_bytes()
    assert sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir()) == ["latest", "step-3", "step-4"]
    assert "cannot be" not in caplog.text


@pytest.mark.parametrize("error", [GONE, THERE])
def test_what_has_not_happened_is_an_error(error: OSError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_PAUSES_S", ())
    (tmp_path / "there" / "more").mkdir(parents=True)
    with pytest.raises(FileExistsError):
        files.make_folder(tmp_path / "there")

    def refuse(*_: Any, **__: Any) -> None:
        raise error

    for call in ("replace", "mkdir", "rmdir"):
        monkeypatch.setattr(os, call, refuse)
    for act in (
        partial(files.rename, tmp_path / "there", tmp_path / "elsewhere"),
        partial(files.make_folder, tmp_path / "new"),
        partial(files.remove_folder, tmp_path / "there"),
    ):
        with pytest.raises(type(error)):
            act()


@NFS
@pytest.mark.parametrize("late", ["state.json", MANIFEST, "model.safetensors", "random-0.json"])
@pytest.mark.usefixtures("gloo_world")
def test_a_file_that_comes_late_is_waited_for(
    late: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The run went on from the checkpoint before, and its next save took the newest out of the way."""
    run, hidden, waited = tmp_path / "run", tmp_path / "hidden", list[float]()
    _train(run, 2)
    folder = run / "checkpoints" / "step-2"

    def wait(seconds: float) -> None:
        waited.append(seconds)
        if sum(waited) > 1 and hidden.exists():
            hidden.rename(folder / late)

    monkeypatch.setattr(files, "_LATE_S", (0.1, 0.4, 1.5))
    monkeypatch.setattr(files, "sleep", wait)
    (folder / late).rename(hidden)
    assert state.read(folder).run.progress.step == 2  # as the ranks of other machines begin
    assert (folder / late).exists()
    waited.clear()
    (folder / late).rename(hidden)
    assert _train(run, 3) == [1, 2, 3]
    assert sum(waited) == pytest.approx(2)
    assert "damaged" not in caplog.text
    (folder / late).unlink()
    assert CheckpointStore(folder.parent, keep=0).newest_valid() == folder.with_name("step-3")


@NFS
def test_a_file_of_a_checkpoint_is_written_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A handle that is stale stays so."""
    written, real = list[Path](), files.sync

    def sync(path: Path) -> None:
        written.append(path)
        if written.count(path) == 1:
            path.unlink()
            raise STALE
        real(path)

    monkeypatch.setattr(files, "sync", sync)
    monkeypatch.setattr(files, "sleep", float)
    monkeypatch.setattr(files, "_LARGE", 4)
    with HashingWriter(tmp_path) as writer:
        for name, content in (("small", b"1"), ("large", b"12345")):
            writer.write(name, [content])
        assert writer.digests.keys() == {"small", "large"}
    assert [(tmp_path / name).read_bytes() for name in ("small", "large")] == [b"1", b"12345"]


@NFS
def test_a_log_with_a_stale_handle_is_opened_anew(tmp_path: Path) -> None:
    log = logging.getLogger("distaccum.stale")
    log.setLevel(logging.INFO)

    class Stale:
        def __getattr__(self, name: str) -> Callable[..., Any]:
            raise STALE

    with RunLog(0) as taken:
        taken.open(tmp_path)
        log.info("one")
        file = taken._file
        assert file is not None
        file.stream.close()
        file.stream = Stale()  # type: ignore[assignment]
        log.info("two")
        log.info("three")
    lines = (tmp_path / "rank-0.log").read_text().splitlines()
    assert [line.split()[-1] for line in lines] == ["one", "two", "three"]
