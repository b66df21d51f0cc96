"""The loop in one process, through a real gloo group of one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from distaccum.accumulation.accumulator import Accumulator
from distaccum.checkpoint.store import CheckpointStore
from distaccum.config.schema import RunConfig
from distaccum.data.factory import build_loader
from distaccum.distributed.environment import LaunchEnvironment
from distaccum.distributed.world import World
from distaccum.errors import DataError
from distaccum.train.components import TrainingComponents, components_from_config
from distaccum.train.loop import Loop, TrainingRun
from distaccum.train.metrics.loggers import Logger
from distaccum.train.part import Part
from distaccum.train.run import build_accumulator, run
from distaccum.train.run_dir import RunDir
from distaccum.train.time_limit import TimeLimit


class Ignored:
    """Twelve samples of which only some have a label that counts."""

    def __init__(self, counting: list[int]) -> None:
        self.counting = counting

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int, /) -> tuple[torch.Tensor, torch.Tensor]:
        label = index % 3 if index in self.counting else -100
        return torch.full((1, 8, 8), index / 12), torch.tensor(label)


class Collected(Logger):
    """A logger that keeps the records."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def log(self, record: Any) -> None:
        self.records.append(dict(record))

    def close(self, *, failed: bool) -> None:
        pass


def _components(
    counting: list[int], *, global_batch_size: int = 1, resume: str = "never", **limits: object
) -> TrainingComponents:
    node = {
        "resume": resume,
        "batch": {"global_size": global_batch_size, "micro_size": 1},
        "data": {"_target_": f"{__name__}.Ignored", "counting": counting},
        "model": {"_target_": "distaccum.models.cnn.CNN", "channels": 2, "classes": 3},
        "loss": {"_target_": "distaccum.losses.cross_entropy.CrossEntropy"},
        "optim": {"optimizer": {"_target_": "torch.optim.SGD"}},
        "schedule": {"_target_": "distaccum.train.schedules.Constant"},
        "trainer": {"log_every": 1, **limits},
        "checkpoint": {"every": 100},
        "metrics": {"console": False, "wandb": {"mode": "disabled"}},
    }
    return components_from_config(RunConfig.from_dict(node), world_size=1, device=torch.device("cpu"))


def _fit(
    world: World, folder: Path, counting: list[int], parts: Sequence[Part] = (), **limits: object
) -> tuple[Loop, Collected]:
    components, logger = _components(counting, **limits), Collected()
    folder.mkdir(exist_ok=True)
    accumulator = build_accumulator(components, world)
    run = TrainingRun(
        components=components,
        accumulator=accumulator,
        loader=build_loader(components.data, components.plan, world),
        run_dir=RunDir(folder),
        store=CheckpointStore(folder / "checkpoints", keep=0),
        loggers=[logger],
        wandb_id="",
        time_limit=TimeLimit(None, began=0.0, parameters=0),
    )
    loop = Loop(run, parts)
    loop.fit()
    return loop, logger


class Told(Part):
    """A part that notes what it is told."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self._name, self._calls = name, calls

    def __getattribute__(self, name: str) -> Any:
        if name in vars(Part) and not name.startswith("_"):
            self._calls.append(f"{self._name} {name}")
        return super().__getattribute__(name)


def test_parts_are_called_in_their_order_and_before_what_the_loop_does_itself(
    gloo_world: World, tmp_path: Path
) -> None:
    calls: list[str] = []
    _fit(gloo_world, tmp_path, [0, 1, 2], [Told("a", calls), Told("b", calls)], max_steps=2, log_every=1)
    window = ["window_begins", "on_window", "on_outcome", "between_windows"]
    expected = ["begins", *window, *window, "windows_ended", "leaves", "before_save"]
    assert calls == [f"{part} {name}" for name in expected for part in "ab"]


def test_windows_that_count_nothing_are_skipped_and_move_only_the_data_on(gloo_world: World, tmp_path: Path) -> None:
    loop, logger = _fit(gloo_world, tmp_path, [3, 7], max_steps=None, max_epochs=2)
    progress = loop.progress
    assert (progress.step, progress.window, progress.skipped, progress.samples, progress.tokens) == (4, 24, 20, 24, 4)
    assert (progress.epoch, progress.epoch_window) == (2, 0)
    assert [record["step"] for record in logger.records] == [1, 2, 3, 4]
    assert json.loads((tmp_path / "checkpoints" / "step-4" / "state.json").read_text())["clocks"]["window"] == 24


def test_data_that_count_nothing_at_all_end_the_run_by_name(gloo_world: World, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="epoch 0: none of its windows counts anything for the loss"):
        _fit(gloo_world, tmp_path, [], max_steps=5)


def test_the_last_update_is_logged_also_when_skipped_windows_follow_it(gloo_world: World, tmp_path: Path) -> None:
    loop, logger = _fit(gloo_world, tmp_path, [0, 3, 7, 9], max_steps=None, max_epochs=2, log_every=5)
    assert loop.progress.step == 8
    assert [record["step"] for record in logger.records] == [5, 8]


def test_a_run_stopped_at_any_window_of_any_epoch_goes_on_as_if_it_had_not(gloo_world: World, tmp_path: Path) -> None:
    """Epochs of three windows, the last of them ragged, some of which count nothing."""

    def updates(folder: Path, resume: str, steps: int) -> list[list[object]]:
        run_dir = RunDir(folder)
        run(
            lambda: _components([0, 3], global_batch_size=5, resume=resume, max_steps=steps),
            run_dir,
            LaunchEnvironment(),
            began=0.0,
        )
        exact = ("step", "window", "epoch", "skipped", "loss", "grad_norm", "lr", "samples", "tokens")
        records = [json.loads(line) for line in run_dir.metrics.read_text().splitlines()]
        return [[record[key] for key in exact] for record in records]

    whole = updates(tmp_path / "whole", "never", 9)
    assert len({epoch for _, _, epoch, *_ in whole}) > 3
    assert whole[-1][3] != 0
    for steps in range(1, 9):
        updates(tmp_path / str(steps), "never", steps)
        assert updates(tmp_path / str(steps), "auto", 9) == whole


def test_after_a_stop_no_window_is_given_out_any_more(gloo_world: World) -> None:
    components = _components(list(range(12)))
    accumulator = Accumulator(components.model, components.optimizers, count=components.loss.count, world=gloo_world)
    loader, given = build_loader(components.data, components.plan, gloo_world), 0
    for _ in range(3):
        for window in accumulator.windows(loader):
            accumulator.step(window, components.loss)
            given += 1
            accumulator.stop()
    assert accumulator.stopping
    assert given == 1  # the one in which it was asked for
