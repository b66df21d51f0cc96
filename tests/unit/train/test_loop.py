"""The loop in one process, through a real gloo group of one."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch

from distaccum.accumulation.step import Outcome
from distaccum.checkpoint.store import CheckpointStore
from distaccum.config.schema import RunConfig
from distaccum.data.factory import build_loader
from distaccum.data.spec import DataSpec
from distaccum.distributed.environment import LaunchEnvironment
from distaccum.distributed.world import World
from distaccum.train.callbacks import Callback, Run
from distaccum.train.components import TrainingComponents, components_from_config
from distaccum.train.loop import Loop, TrainingRun
from distaccum.train.metrics.loggers import Logger
from distaccum.train.parts.base import Part
from distaccum.train.run import Launch, Start, build_accumulator, open_parts, run
from distaccum.train.run_dir import RunDir


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
    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def log(self, record: Any) -> None:
        self.records.append(dict(record))

    def close(self, *, failed: bool) -> None:
        pass


def _components(
    counting: list[int], *, global_batch_size: int = 1, resume: str = "never", **limits: object
) -> TrainingComponents:
    node = _node({"_target_": f"{__name__}.Ignored", "counting": counting}, **limits)
    node |= {"resume": resume, "batch": {"global_size": global_batch_size, "micro_size": 1}}
    return components_from_config(RunConfig.from_dict(node), world_size=1, device=torch.device("cpu"))


def _node(data: dict[str, Any], **limits: object) -> dict[str, Any]:
    return {
        "batch": {"global_size": 1, "micro_size": 1},
        "data": data,
        "model": {"_target_": "distaccum.models.cnn.CNN", "channels": 2, "classes": 3},
        "loss": {"_target_": "distaccum.losses.cross_entropy.CrossEntropy"},
        "optim": {"optimizer": {"_target_": "torch.optim.SGD"}},
        "schedule": {"_target_": "distaccum.train.schedules.Constant"},
        "trainer": {"log_every": 1, **limits},
        "checkpoint": {"every": 100},
        "metrics": {"console": False, "wandb": {"mode": "disabled"}},
    }


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
        began=0.0,
    )
    with ExitStack() as closing:
        loop = Loop(run, [*parts, *open_parts(run, None, closing)])
        loop.fit()
    return loop, logger


def _run(make_components: Callable[[], TrainingComponents], folder: Path) -> RunDir:
    run_dir = RunDir(folder)
    run(Start(make_components=make_components, run_dir=run_dir, launch=Launch(LaunchEnvironment()), began=0.0))
    return run_dir


class Told(Part):
    def __init__(self, name: str, calls: list[str]) -> None:
        self._name, self._calls = name, calls

    def __getattribute__(self, name: str) -> Any:
        asked = ("watches", "trouble", "due", "wants_record")
        if name in vars(Part) and not name.startswith("_") and name not in asked:
            self._calls.append(f"{self._name} {name}")
        return super().__getattribute__(name)


def test_parts_are_called_in_their_order(gloo_world: World, tmp_path: Path) -> None:
    calls: list[str] = []
    _fit(gloo_world, tmp_path, [0, 1, 2], [Told("a", calls), Told("b", calls)], max_steps=2, log_every=1)
    window = ["window_begins", "on_window", "on_update", "adds", "between_windows"]
    expected = [
        "begins",
        *window,
        *window,
        "windows_ended",
        "leaves",
        "ends",
        "before_save",
        "on_checkpoint",
        "resumes",
    ]
    assert calls == [f"{part} {name}" for name in [*expected, "on_end"] for part in "ab"]


class Faulty(Ignored):
    def __getitem__(self, index: int, /) -> tuple[torch.Tensor, torch.Tensor]:
        image, label = super().__getitem__(index)
        return (image * float("nan") if index == 0 else image), label


def held_out() -> DataSpec:
    return DataSpec(train=Faulty(list(range(12))), eval_dataset=Ignored(list(range(12))))


class Noted(Callback):
    """Notes what it is told, and what is written meanwhile."""

    notes: ClassVar[list[str]] = []

    def on_update(self, run: Run, outcome: Outcome) -> None:
        self.notes.append(f"update {run.progress.window}")

    def on_skip(self, run: Run, outcome: Outcome) -> None:
        self.notes.append(f"skip {run.progress.window}")

    def on_eval(self, run: Run, results: Mapping[str, float]) -> None:
        self.notes.append("evaluation")

    def on_checkpoint(self, run: Run, path: Path) -> None:
        self.notes.append(path.name)

    def on_end(self, run: Run, results: Mapping[str, float]) -> None:
        self.notes.append("end")


class Written(Logger):
    def log(self, record: Any) -> None:
        Noted.notes.append(f"record {record['window']}{' with results' * ('eval_loss' in record)}")

    def close(self, *, failed: bool) -> None:
        pass


def test_an_update_is_told_evaluated_recorded_and_saved_and_a_skip_is_recorded_first(
    gloo_world: World, tmp_path: Path
) -> None:
    """A checkpoint follows its record, which holds the evaluation of what callbacks have seen."""
    node = _node({"_target_": f"{__name__}.held_out"}, max_steps=11, nonfinite="skip", eval_every=4, log_every=2)
    node |= {"checkpoint": {"every": 4}, "callbacks": {"noted": {"_target_": f"{__name__}.Noted"}}}
    node["metrics"] |= {"loggers": {"written": {"_target_": f"{__name__}.Written"}}}
    Noted.notes.clear()
    made = partial(components_from_config, RunConfig.from_dict(node), world_size=1, device=torch.device("cpu"))
    _run(made, tmp_path)
    skips = [i for i, note in enumerate(Noted.notes) if note.startswith("skip")]
    assert skips
    for i in skips:
        assert Noted.notes[i - 1] == Noted.notes[i].replace("skip", "record")
    told, step, expected = [note for note in Noted.notes if not note.startswith("skip")], 0, list[str]()
    skipped = {note.partition(" ")[2] for note in Noted.notes if note.startswith("skip")}
    for window in map(str, range(1, 12 + len(skipped))):
        if window in skipped:
            expected.append(f"record {window}")
            continue
        step += 1
        evaluates, saves = step in (4, 8, 11), step in (4, 8)
        expected += [f"update {window}", *["evaluation"] * evaluates]
        expected += [f"record {window}{' with results' * evaluates}"] * (step % 2 == 0 or step == 11)
        expected += [f"step-{step}"] * saves
    assert told == [*expected, "step-11", "end"]


def test_windows_that_count_nothing_are_skipped_and_move_only_the_data_on(gloo_world: World, tmp_path: Path) -> None:
    loop, logger = _fit(gloo_world, tmp_path, [3, 7], max_steps=None, max_epochs=2)
    progress = loop.progress
    assert (progress.step, progress.window, progress.skipped, progress.samples, progress.tokens) == (4, 24, 20, 24, 4)
    assert (progress.epoch, progress.epoch_window) == (2, 0)
    assert [record["step"] for record in logger.records] == [1, 2, 3, 4]
    assert json.loads((tmp_path / "checkpoints" / "step-4" / "state.json").read_text())["clocks"]["window"] == 24


def test_the_last_update_is_logged_also_when_skipped_windows_follow_it(gloo_world: World, tmp_path: Path) -> None:
    loop, logger = _fit(gloo_world, tmp_path, [0, 3, 7, 9], max_steps=None, max_epochs=2, log_every=5)
    assert loop.progress.step == 8
    assert [record["step"] for record in logger.records] == [5, 8]


def test_a_run_stopped_at_any_window_of_any_epoch_goes_on_as_if_it_had_not(gloo_world: World, tmp_path: Path) -> None:
    """Epochs of three windows, the last of them ragged, some of which count nothing: it goes on beyond the next one."""

    def updates(folder: Path, resume: str, steps: int) -> list[list[object]]:
        run_dir = _run(lambda: _components([0, 3], global_batch_size=5, resume=resume, max_steps=steps), folder)
        exact = ("step", "window", "epoch", "skipped", "loss", "grad_norm", "lr", "samples", "tokens")
        records = [json.loads(line) for line in run_dir.metrics.read_text().splitlines()]
        return [[record[key] for key in exact] for record in records]

    whole = updates(tmp_path / "whole", "never", 9)
    assert len({epoch for _, _, epoch, *_ in whole}) > 3
    assert whole[-1][3] != 0
    for first in (1, 2, 3):
        for steps in (*range(first, 9, 3), 9):
            found = updates(tmp_path / str(first), "auto", steps)
            assert found == whole[: len(found)]
        assert len(found) == len(whole)
