"""What the simulation holds a run to can fail: each way to break the product is noticed in one of a few cells."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from distaccum.accumulation.accumulator import Accumulator
from distaccum.checkpoint import files, store
from distaccum.checkpoint.store import CheckpointStore
from distaccum.errors import CheckpointError
from distaccum.tools import history, record_file
from distaccum.train.loop import Loop
from distaccum.train.metrics.loggers import JsonlLogger
from distaccum.train.owner import Owner
from distaccum.train.parts.records import Records
from distaccum.train.run_dir import RunDir, State
from distaccum.train.saving import BackgroundSave, HostMemory, Written
from tests.simulation.cells import (
    At,
    Attempt,
    Crashes,
    Damages,
    Fails,
    Fault,
    Plan,
    Sleeps,
    ViolationError,
    Visited,
    simulate,
)

pytestmark = pytest.mark.heavy
PLAN = Plan(steps=6, save_every=2, keep=2)
BEHIND = replace(PLAN, background=True, pace=0)  # nothing is written until it is waited for
Cells = list[tuple[Plan, list[Attempt]]]


def _cells(*faults: Fault, plan: Plan = PLAN, damages: tuple[Damages, ...] = ()) -> Cells:
    return [(plan, [Attempt(faults=(fault,), damages=damages)]) for fault in faults]


def _saved(number: int, **options: Any) -> Cells:
    """Killed after so many checkpoints, with damage after that."""
    at = At(number=number + 1, kind="rename", path="history.json")
    return _cells(Crashes(at=at, after=True), **options)


def _power(path: str, *numbers: int) -> Cells:
    return _cells(
        *(Crashes(at=At(number=number, kind="rename", path=path), after=True, power=number) for number in numbers)
    )


def _put(owner: Any, name: str, function: Callable[..., Any]) -> Callable[[pytest.MonkeyPatch], None]:
    """Has something else stand in a place."""
    return lambda patch: patch.setattr(owner, name, function)


def _no_sync(patch: pytest.MonkeyPatch) -> None:
    for module in (files, files, store):
        patch.setattr(module, "sync", lambda _: None)


def _latest_first(patch: pytest.MonkeyPatch) -> None:
    def publish(self: CheckpointStore, temporary: Path, final: Path) -> None:
        files.write_text(self.root / "latest", final.name + "\n")
        real(self, temporary, final)

    real = CheckpointStore._publish
    patch.setattr(CheckpointStore, "_publish", publish)


def _keeps_one_less(patch: pytest.MonkeyPatch) -> None:
    def prune(self: CheckpointStore) -> None:
        self._keep -= 1
        real(self)
        self._keep += 1

    real = CheckpointStore._prune
    patch.setattr(CheckpointStore, "_prune", prune)


def _removes_in_place(patch: pytest.MonkeyPatch) -> None:
    def prune(self: CheckpointStore) -> None:
        for path in self.steps()[: -self._keep]:
            shutil.rmtree(path)

    patch.setattr(CheckpointStore, "_prune", prune)


def _asks_nobody(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Owner, "require", lambda _: None)
    patch.setattr(record_file.RecordFile, "_token", lambda _: "")  # which asks where the records were replaced


def _errors_are_damage(patch: pytest.MonkeyPatch) -> None:
    def verify(path: Path) -> None:
        try:
            real(path)
        except CheckpointError as error:
            raise CheckpointError(str(error)) from None

    real = store.verify
    patch.setattr(store, "verify", verify)
    for module in (store, files):
        patch.setattr(module, "retried", lambda read, of=None: read())


def _done_too_early(patch: pytest.MonkeyPatch) -> None:
    def write(self: Records, run: Loop) -> None:
        if self._accumulator.world.is_main and run.progress.step:
            self._run_dir.write_status(State.DONE, step=run.progress.step)

    patch.setattr(Records, "write_status", write)


def _another_position(patch: pytest.MonkeyPatch) -> None:
    def restore(self: Any, progress: Any, position: Any, data: Any, spikes: Any) -> None:
        real(self, progress, position, data, spikes)
        torch.nn.Module.get_parameter(self.model, "module.bias" if hasattr(self.model, "module") else "bias").data.add_(
            1e-6
        )

    real = Accumulator.restore
    patch.setattr(Accumulator, "restore", restore)


def _waits_for_nothing(patch: pytest.MonkeyPatch) -> None:
    def take(self: BackgroundSave, within_s: float | None = None) -> Written:
        self._thread, self.ready = None, False
        return Written(self.step, {}, 0.0)

    patch.setattr(BackgroundSave, "take", take)


FLIP = Damages(name="step-4/model")
SABOTAGES: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Cells, str]] = {
    "no sync before a rename": (_no_sync, _power("history.json", *range(2, 5)) + _power("latest", 2, 3), "."),
    "removes what is damaged": (
        _put(store, "_set_aside", lambda path, *_: shutil.rmtree(path) if path.is_dir() else path.unlink()),
        _saved(2, damages=(FLIP,)),
        "is removed in its place",
    ),
    "latest before the checkpoint": (_latest_first, [(PLAN, [])], "latest names step-2, which is not whole"),
    "checkpoints are not sealed": (
        _put(store, "_seal", lambda *_: None),
        [(PLAN, [])],
        "latest names step-2, which is not whole",
    ),
    "keeps one less": (_keeps_one_less, [(PLAN, [])], r"step-2 is removed while only \[4\] are whole"),
    "counts damaged ones as kept": (
        _put(CheckpointStore, "_is_whole", lambda *_: True),
        _saved(3, plan=Plan(steps=8, save_every=2, keep=3), damages=(FLIP,)),
        "step-2 is removed while only",
    ),
    "removes a checkpoint in its place": (_removes_in_place, [(PLAN, [])], "is removed in its place"),
    "a sleeper writes": (
        _asks_nobody,
        _cells(Sleeps(at=At(number=2, kind="stat", path=".failure"))),
        "a process that slept",
    ),
    "takes over from the living": (
        _put(Owner, "why_dead", lambda *_: "is gone"),
        _cells(Visited(at=At(number=2, kind="stat", path=".failure"))),
        "a visitor",
    ),
    "an error is damage": (
        _errors_are_damage,
        [(PLAN, [*_saved(2)[0][1], Attempt(faults=(Fails(at=At(number=1, kind="open", path="step-4/model")),))])],
        "resumed from step 2 while step 4 is whole",
    ),
    "done before the end": (_done_too_early, [(PLAN, [])], "done before the end"),
    "records come twice": (
        _put(record_file, "rewind", lambda *_, **__: None),
        _cells(Crashes(at=At(number=6, kind="rename", path="status.json"), after=True)),
        "rows of steps",
    ),
    "lost records are not told": (
        _put(record_file._log, "warning", lambda *_: None),
        _saved(2, damages=(Damages(name="metrics.jsonl", how="delete"),)),
        "nobody says so",
    ),
    "begins at zero": (
        _put(history, "require_no_history", lambda _: None),
        _saved(2, damages=(Damages(name="step-", how="lose"),)),
        "begins at zero",
    ),
    "leaves what the dead left": (
        _put(RunDir, "_clear", lambda _: None),
        _cells(Crashes(at=At(number=1, kind="rename", path="plan.json"))),
        "left behind|File exists",
    ),
    "records in memory": (
        _put(JsonlLogger, "sync", lambda _: None),
        _power("history.json", *range(2, 5)),
        "rows of steps|before the end",
    ),
    "a sleeper publishes": (
        _asks_nobody,
        _cells(Sleeps(at=At(number=3, kind="fsync", path="/.saving-")), plan=BEHIND),
        "a process that slept",
    ),
    "no sync behind the training": (
        _no_sync,
        [(BEHIND, attempts) for _, attempts in _power("history.json", *range(2, 5)) + _power("latest", 2, 3)],
        ".",
    ),
    "no copy is made": (
        _put(HostMemory, "copy", lambda _, tensor: tensor.detach()),
        _saved(1, plan=BEHIND),
        "differs|the row of",
    ),
    "published before it is written": (_waits_for_nothing, _saved(1, plan=BEHIND), "without damage|not whole"),
    "a bit more after a resume": (_another_position, _saved(1), "differs|the row of"),
}


def _simulate(cells: Cells) -> None:
    for cell in cells:
        simulate(*cell)


@pytest.mark.parametrize("name", SABOTAGES)
def test_it_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sabotage, cells, _ = SABOTAGES[name]
    _simulate(cells)  # nothing is wrong without it
    sabotage(monkeypatch)
    _, _, said = SABOTAGES[name]
    with pytest.raises(ViolationError, match=said):
        _simulate(cells)
