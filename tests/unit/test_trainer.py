"""The Trainer in one process, through a real gloo group of one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from distaccum.build import build_engine, build_parts
from distaccum.checkpoint.store import CheckpointStore
from distaccum.clocks import Clocks
from distaccum.config import from_node
from distaccum.errors import DataError
from distaccum.run_dir import RunDir
from distaccum.trainer import Trainer
from distaccum.world import World


class Ignored:
    """Twelve samples of which only some have a label that counts."""

    def __init__(self, counting: list[int]) -> None:
        self.counting = counting

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int, /) -> tuple[torch.Tensor, torch.Tensor]:
        label = index % 3 if index in self.counting else -100
        return torch.full((1, 8, 8), index / 12), torch.tensor(label)


class Collected:
    """A sink that keeps the records."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def log(self, record: Any) -> None:
        self.records.append(dict(record))

    def close(self, *, failed: bool) -> None:
        pass


def _fit(world: World, folder: Path, counting: list[int], **limits: object) -> tuple[Trainer, Collected]:
    node = {
        "batch": {"global_size": 1, "micro_size": 1},
        "data": {"_target_": f"{__name__}.Ignored", "counting": counting},
        "model": {"_target_": "distaccum.models.cnn.CNN", "channels": 2, "classes": 3},
        "loss": {"_target_": "distaccum.loss.CrossEntropy"},
        "optim": {"optimizer": {"_target_": "torch.optim.SGD"}},
        "schedule": {"_target_": "distaccum.schedule.Constant"},
        "trainer": {"log_every": 1, **limits},
        "checkpoint": {"every": 100},
    }
    parts, sink = build_parts(from_node(node), world_size=1, device=world.device), Collected()
    folder.mkdir(exist_ok=True)
    trainer = Trainer(
        parts, build_engine(parts, world), world, run_dir=RunDir(folder),
        store=CheckpointStore(folder / "checkpoints", keep=0), sinks=[sink], clocks=Clocks(), wandb_id="",
    )  # fmt: skip
    trainer.fit()
    return trainer, sink


def test_windows_that_count_nothing_are_skipped_and_move_only_the_data_on(gloo_world: World, tmp_path: Path) -> None:
    trainer, sink = _fit(gloo_world, tmp_path, [3, 7], max_steps=None, max_epochs=2)
    clocks = trainer.clocks
    assert (clocks.step, clocks.window, clocks.skipped, clocks.samples, clocks.tokens) == (4, 24, 20, 24, 4)
    assert [record["step"] for record in sink.records] == [1, 2, 3, 4]
    assert json.loads((tmp_path / "checkpoints" / "step-4" / "state.json").read_text())["clocks"]["window"] == 24


def test_data_that_count_nothing_at_all_end_the_run_by_name(gloo_world: World, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="12 windows in a row, a whole epoch, count nothing"):
        _fit(gloo_world, tmp_path, [], max_steps=5)


def test_the_last_update_is_logged_also_when_skipped_windows_follow_it(gloo_world: World, tmp_path: Path) -> None:
    trainer, sink = _fit(gloo_world, tmp_path, [0, 3, 7, 9], max_steps=None, max_epochs=2, log_every=5)
    assert trainer.clocks.step == 8
    assert [record["step"] for record in sink.records] == [5, 8]
