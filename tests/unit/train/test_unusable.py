"""What a run finds and cannot use: one line before anything changes, or a warning."""

import errno
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed import DistNetworkError, HashStore, Store

from distaccum import CrossEntropy, DataSpec, Trainer
from distaccum.checkpoint.store import MANIFEST, _seal
from distaccum.data import factory
from distaccum.data.factory import loading_options
from distaccum.data.loading_processes import Iteration
from distaccum.distributed.environment import LaunchEnvironment
from distaccum.distributed.world import World
from distaccum.errors import ConfigError, DataError
from distaccum.train import cli
from distaccum.train.run import Launch
from distaccum.train.run_dir import RunDir
from tests.support.runs import settings
from tests.unit.checkpoint.test_damage import Canary, _torch

DATA = [(torch.full((4,), i / 16), torch.tensor(i % 3)) for i in range(16)]


class Counts(nn.Linear):
    """A model with extra state."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.forwards = 0

    def forward(self, batch: Tensor) -> Tensor:
        self.forwards += self.training
        return super().forward(batch)

    def get_extra_state(self) -> Any:
        return {"forwards": self.forwards}

    def set_extra_state(self, state: Any) -> None:
        self.forwards = state["forwards"]


def _fit(folder: Path, steps: int, model: nn.Module | None = None, **groups: Any) -> None:
    trainer = {"max_steps": steps, "eval_every": 0, "log_every": 1, "verify": "never"}
    config = settings((4, 4), trainer, save=1, resume=groups.pop("resume", "auto"), **groups)
    Trainer(model or nn.Linear(4, 3), CrossEntropy(), DataSpec(train=DATA), config=config, run_dir=folder).fit()


@pytest.mark.parametrize("how", ["resume", "init_from"])
@pytest.mark.parametrize("content", ["code", "torn"])
def test_extra_state_that_is_a_pickle_is_not_read(how: str, content: str, gloo_world: World, tmp_path: Path) -> None:
    """The error was torch's own, after the process group was made."""
    _fit(tmp_path / "run", 1, Counts())
    step, canary = tmp_path / "run" / "checkpoints" / "step-1", tmp_path / "canary"
    harm = _torch(Canary(canary))
    held = load_file(step / "model.safetensors")
    held["_extra_state"] = torch.frombuffer(bytearray(harm if content == "code" else harm[:60]), dtype=torch.uint8)
    save_file(held, step / "model.safetensors")
    (step / MANIFEST).unlink()
    _seal(step)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    folder, more = (tmp_path / "run", {}) if how == "resume" else (tmp_path / "new", {"init_from": str(step)})
    with pytest.raises(ConfigError) as caught:
        _fit(folder, 2, Counts(), resume="auto" if how == "resume" else "never", **more)
    assert "has extra state of a module as _extra_state: it holds more than tensors" in str(caught.value)
    assert not canary.exists()
    after = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    after.pop(tmp_path / "run" / "status.json", None)
    before.pop(tmp_path / "run" / "status.json", None)
    assert after == before


@pytest.mark.parametrize("name", ["metrics.jsonl", "windows.jsonl", "checkpoints", "logs"])
@pytest.mark.parametrize("how", ["is a link to nothing", "cannot be written", "cannot be written, of a kind"])
@pytest.mark.fault("`metrics.jsonl`, `checkpoints` or `logs` in a run directory is another user's, a link to nothing")
def test_what_is_another_users_or_nothing(
    name: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Callable[[str], None]
) -> None:
    """Its records failed once the ranks had met, or its first checkpoint after minutes of training."""
    path, access = tmp_path / "run" / name, os.access  # which tells root that all may be written
    path.parent.mkdir()
    if how.endswith("nothing"):
        path.symlink_to(tmp_path / "nowhere")
    elif (name in ("checkpoints", "logs")) == how.endswith("written"):
        path.mkdir()
    else:
        path.touch()
    if how.endswith("written"):
        monkeypatch.setattr(os, "access", lambda of, mode: Path(of) != path and access(of, mode))
    with pytest.raises(ConfigError) as caught:
        RunDir(path.parent).make()
    assert f"its {name} {how.partition(',')[0]}" in str(caught.value)
    if how.endswith("nothing"):
        says(str(caught.value))
    assert [one.name for one in path.parent.iterdir()] == [name]
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.fault("`/dev/shm` is read-only, with loading processes")
def test_shared_memory_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Callable[[str], None]
) -> None:
    access = os.access
    monkeypatch.setattr(factory, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path and access(path, mode))
    with pytest.raises(ConfigError) as caught:
        loading_options(DataSpec(train=DATA), num_workers=2)
    says(str(caught.value))
    loading_options(DataSpec(train=DATA), num_workers=0)
    monkeypatch.setattr(factory.sys, "platform", "darwin")
    loading_options(DataSpec(train=DATA), num_workers=2)


def test_shared_memory_without_room_for_a_semaphore() -> None:
    """It said "No space left on device. Make room there", and not where."""

    class Full(list[int]):
        def __iter__(self) -> Iterator[int]:
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(DataError, match=r"could be started .*No space left.* /dev/shm has .*--shm-size=8g"):
        Iteration().begin(Full())


def test_a_path_that_is_too_long_is_none(gloo_world: World, tmp_path: Path) -> None:
    long = str(tmp_path / ("d" * 300))
    with pytest.raises(ConfigError, match=r"^resume=.*no such checkpoint folder"):
        _fit(tmp_path / "run", 1, resume=long)
    with pytest.raises(ConfigError, match=r"^init_from=.*File name too long"):
        _fit(tmp_path / "run", 1, init_from=long)


@pytest.mark.fault("the launcher's store dies before a run begins")
def test_a_store_that_dies_before_a_run_begins(caplog: pytest.LogCaptureFixture, says: Callable[[str], None]) -> None:
    """It was a traceback of torch's."""

    class Lost(Launch):
        def store(self) -> Store:
            raise DistNetworkError("Connection reset by peer\nException raised from recvBytes")

    class Dying(HashStore):
        def set(self, key: str, value: str) -> None:
            raise DistNetworkError("Connection reset by peer")

    class Dies(Launch):
        def store(self) -> Store:
            return Dying()

    for launch in (Lost, Dies):
        caplog.clear()
        assert cli._run_rank(LaunchEnvironment(), launch) == 1
        (record,) = caplog.messages
        says(record)


BROKEN = [
    "",
    '{"checkpoint": 5}',
    '{"checkpoint": "step-1"}',
    '{"checkpoint": "step-1", "metric": "eval_loss", "value": []}',
]


@pytest.mark.parametrize("content", BROKEN)
def test_a_record_of_the_best_that_is_none(content: str, gloo_world: World, tmp_path: Path) -> None:
    """Whatever `best.json` holds, a run goes on, and the best is that of its evaluations from there on."""
    held = {"eval_dataset": DATA[:4]}
    for steps in (1, 3):
        trainer = {"max_steps": steps, "eval_every": 1, "log_every": 1, "verify": "never"}
        config = settings((4, 4), trainer, save=1, resume="auto", checkpoint={"best": "eval_loss"})
        data = DataSpec(train=DATA, **held)
        torch.manual_seed(0)
        Trainer(nn.Linear(4, 3), CrossEntropy(), data, config=config, run_dir=tmp_path).fit()
        if steps == 1:
            (tmp_path / "checkpoints" / "best.json").write_text(content)
    found = json.loads((tmp_path / "checkpoints" / "best.json").read_text())
    assert found["checkpoint"] in ("step-2", "step-3")
    assert (tmp_path / "checkpoints" / "best").read_text().strip() == found["checkpoint"]
