"""What a view of an elastic run leaves to the next one: here one process is in all of them, and ends them itself."""

from __future__ import annotations

import gc
import json
import math
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from distaccum import DataSpec, RunConfig
from distaccum.accumulation import tracker
from distaccum.accumulation.step import Outcome
from distaccum.accumulation.tracker import ProgressTracker
from distaccum.checkpoint.store import CheckpointStore
from distaccum.distributed.elastic.member import Member
from distaccum.distributed.elastic.polled_group import ViewChangedError
from distaccum.distributed.elastic.views import Report, View
from distaccum.distributed.environment import LaunchEnvironment
from distaccum.distributed.world import World
from distaccum.errors import MisuseError, NonFiniteError, SpikeError
from distaccum.train import run as run_module
from distaccum.train.callbacks import Callback, Run
from distaccum.train.components import build_components
from distaccum.train.elastic.carried import Carried
from distaccum.train.elastic.joining import JoinRider
from distaccum.train.loop import Loop
from distaccum.train.metrics.meter import Meter
from distaccum.train.run import run
from distaccum.train.run_dir import RunDir
from tests.unit.train.test_skips import Square

pytestmark = pytest.mark.usefixtures("gloo_world")
_NAME = "0.0.1"
_TIMES = ("_per_s", "_s", "_bytes")


class Alone:
    """A member of views that nobody else is in."""

    name, rank, is_first = _NAME, 0, True
    told: Mapping[str, Any] = {}
    membership = SimpleNamespace(wishes=lambda: False)

    def __init__(self) -> None:
        self.views = 0
        self.codes: list[int] = []
        self._said: set[str] = set()
        self.environment = LaunchEnvironment.current()

    def next_view(self, _: View | None, report: Report) -> tuple[View, Mapping[str, Report]]:
        self.views += 1
        return View(generation=self.views - 1, members=(_NAME,)), {_NAME: report}

    @contextmanager
    def world(self, *_: object) -> Iterator[tuple[World, Any]]:
        yield World.join(), SimpleNamespace(changes=nullcontext)

    def began(self, own: float) -> float:
        return own

    def tell_folder(self, path: Path, token: str) -> None:
        """Nobody asks."""

    def first_to(self, what: str) -> bool:
        is_first = what not in self._said
        self._said.add(what)
        return is_first

    def end(self, code: int) -> None:
        self.codes.append(code)


class Told(Callback):
    """Notes what it is told, and acts once, when it is told of window ``at``."""

    def __init__(self, at: int = -1, act: Callable[[Run], None] = lambda _: None) -> None:
        self._at, self._act = at, act
        self.told: list[tuple[str, int]] = []

    def _tell(self, what: str, run: Run) -> None:
        if run.progress.window == self._at:
            self._at = -1
            self._act(run)
        self.told.append((what, run.progress.window))

    def on_update(self, run: Run, _: Outcome) -> None:
        self._tell("update", run)

    def on_skip(self, run: Run, _: Outcome) -> None:
        self._tell("skip", run)

    def on_checkpoint(self, run: Run, _: Path) -> None:
        self._tell("checkpoint", run)


class Becomes(Alone):
    """Not rank 0 as the job begins, and rank 0 from the first view on."""

    def __init__(self) -> None:
        super().__init__()
        self.environment = replace(self.environment, rank=1, size=2)


def _fit(
    folder: Path,
    *told: Callback,
    bad: tuple[int, ...] = (),
    by: float = math.inf,
    model: nn.Module | None = None,
    member: Alone | None = None,
    settings: Mapping[str, Any] | None = None,
    **trainer: Any,
) -> Alone:
    """Trains on 16 windows of two samples; those of the windows ``bad`` are ``by`` too large."""
    torch.manual_seed(0)
    samples = list(torch.randn(32, 3))
    for window in bad:
        samples[2 * window - 2] = samples[2 * window - 2] * by
    config = RunConfig.from_dict(
        {
            "batch": {"global_size": 2, "micro_size": 1},
            "trainer": {"max_steps": None, "max_epochs": 1, "log_every": 1, "verify": "never", **trainer},
            "metrics": {"console": False, "wandb": {"mode": "disabled"}},
            "numerics": "reproducible",
            **(settings or {}),
        }
    )
    trained, member = model or nn.Linear(3, 1), member or Alone()
    run(
        lambda: build_components(
            config,
            DataSpec(train=samples, eval_dataset=samples[:4], description="numbers", shuffle=False),
            trained,
            Square(),
            world_size=1,
            device=torch.device("cpu"),
            callbacks=told,
            elastic=True,
        ),
        RunDir(folder),
        member.environment,
        began=time.monotonic(),
        member=cast(Member, member),
    )
    return member


def _records(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if not key.endswith(_TIMES)} for line in lines]


def _leave(*_: object, **__: object) -> Any:
    raise ViewChangedError("a member is gone")


def _leave_in(owner: Any, name: str, patch: pytest.MonkeyPatch, *, at: int = 1) -> list[int]:
    """Has the ``at``-th call of a function be the end of the view; the list grows with each call."""
    inner, calls = getattr(owner, name), list[int]()

    def outer(*given: Any, **named: Any) -> Any:
        calls.append(len(calls) + 1)
        return _leave() if calls[-1] == at else inner(*given, **named)

    patch.setattr(owner, name, outer)
    return calls


def _wait_to_join(patch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A function after which the next count ends the view."""
    wished = list[float]()
    patch.setattr(JoinRider, "outgoing", lambda *_: [wished.pop() if wished else 0.0])
    return lambda: wished.append(1.0)


def test_a_stop_after_a_change_has_the_record_that_was_not_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fit(tmp_path / "undisturbed", Told(6, lambda run: run.stop("enough")), log_every=4)
    wish = _wait_to_join(monkeypatch)

    def stop(run: Run) -> None:
        run.stop("enough")
        wish()

    member = _fit(tmp_path / "run", Told(6, stop), log_every=4)
    assert member.views == 2
    assert [one["window"] for one in _records(tmp_path / "run")] == [4, 6]
    assert _records(tmp_path / "run") == _records(tmp_path / "undisturbed")


@pytest.mark.parametrize("place", ["record", "on_skip"])
def test_a_skipped_window_is_told_of_once(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"bad": (3, 5), "nonfinite": "skip"}
    _fit(tmp_path / "undisturbed", undisturbed := Told(), **settings)
    if place == "record":
        _leave_in(Meter, "record", monkeypatch, at=5)
    member = _fit(tmp_path / "run", told := Told(*((5, _leave) if place == "on_skip" else ())), **settings)
    assert member.views == 2
    records = _records(tmp_path / "run")
    assert [one["window"] for one in records if not one["applied"]] == [3, 5]
    assert records == _records(tmp_path / "undisturbed")
    assert told.told == undisturbed.told


def test_callbacks_before_one_in_which_a_rank_is_lost_are_told_once(tmp_path: Path) -> None:
    _fit(tmp_path / "undisturbed", undisturbed := Told(), bad=(5,), nonfinite="skip")
    before, after = Told(), Told()
    member = _fit(tmp_path / "run", before, Told(3, _leave), Told(5, _leave), after, bad=(5,), nonfinite="skip")
    assert member.views == 3
    assert before.told == after.told == undisturbed.told


@pytest.mark.parametrize("name", ["diagnose", "explain"])
def test_a_gradient_that_ends_the_run_does_so_when_a_rank_is_lost_over_its_explanation(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = _leave_in(tracker, name, monkeypatch)
    told = Told()
    with pytest.raises(NonFiniteError, match="the gradient of window 5 is NaN or infinite"):
        _fit(tmp_path / "run", told, bad=(5,))
    assert calls
    assert told.told == [*(("update", window) for window in range(1, 5)), ("skip", 5)]
    assert [one["window"] for one in _records(tmp_path / "run")] == [1, 2, 3, 4, 5]


def test_spikes_that_end_the_run_do_so_in_the_next_view(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wish = _wait_to_join(monkeypatch)
    settings: dict[str, Any] = {"on_spike": "skip", "max_skips": 3, "spike_window": 4}
    with pytest.raises(SpikeError, match="the last of 3 in a row"):
        _fit(tmp_path / "run", Told(9, lambda _: wish()), bad=(7, 8, 9), by=1000.0, **settings)
    assert len(_records(tmp_path / "run")) == 9


@pytest.mark.parametrize("at", [3, 4])
def test_windows_that_are_skipped_in_a_row_count_over_views(
    at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wish = _wait_to_join(monkeypatch)
    settings: dict[str, Any] = {"nonfinite": "skip", "max_skips": 3, "bad": (3, 4, 5)}
    with pytest.raises(NonFiniteError, match=r"of window 5 is NaN or infinite \(3 in a row"):
        _fit(tmp_path / "run", Told(at, lambda _: wish()), **settings)


def test_what_was_carried_goes_once_the_run_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = list[weakref.ref[Any]]()
    alive = list[int]()
    carried = Loop.carried

    def noted(loop: Loop) -> Carried:
        found = carried(loop)
        kept = {} if found.begun is None else found.begun.kept.sums
        held.extend(weakref.ref(one) for one in (found, *found.engine.model.values(), *found.engine.optimizer.values()))
        held.extend(weakref.ref(one) for sums in kept.values() for one in sums)
        return found

    monkeypatch.setattr(Loop, "carried", noted)

    class Counts(Told):
        def on_update(self, run: Run, outcome: Outcome) -> None:
            if held and not alive:
                gc.collect()
                alive.extend(one() is not None for one in held)
            super().on_update(run, outcome)

    _leave_in(ProgressTracker, "begin_step", monkeypatch, at=5)
    member = _fit(tmp_path / "run", Counts())
    assert member.views == 2
    assert len(alive) > 6
    assert not any(alive)


def test_a_state_that_the_next_view_cannot_take_up_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fit(tmp_path / "undisturbed", Told())
    _leave_in(ProgressTracker, "begin_step", monkeypatch, at=5)
    _leave_in(run_module, "build_loader", monkeypatch, at=2)
    _leave_in(Loop, "fit", monkeypatch, at=2)
    member = _fit(tmp_path / "run", Told())
    assert member.views == 4
    assert _records(tmp_path / "run") == _records(tmp_path / "undisturbed")


_SAVES: dict[str, dict[str, Any]] = {
    "every": {"checkpoint": {"every": 4, "keep": 0}},
    "best": {"checkpoint": {"every": 1000, "best": "eval_loss", "keep": 0}},
    "last": {"checkpoint": {"every": 1000, "keep": 0}},
}


@pytest.mark.parametrize("place", ["published", "told"])
@pytest.mark.parametrize("saves", _SAVES)
def test_a_checkpoint_that_the_view_before_has_published_is_told_and_not_made_again(
    saves: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"settings": _SAVES[saves], "eval_every": 4}
    _fit(tmp_path / "undisturbed", undisturbed := Told(), **settings)
    published = [window for what, window in undisturbed.told if what == "checkpoint"]
    made, left, told = list[int](), list[int](), Told()
    store = CheckpointStore.save

    def leave_once(step: int) -> None:
        if step not in left:
            left.append(step)
            _leave()

    def save(self: CheckpointStore, step: int, *given: Any, **named: Any) -> Path:
        made.append(step)
        path = store(self, step, *given, **named)
        if place == "published":
            leave_once(step)
        return path

    class Leaves(Callback):
        def on_checkpoint(self, run: Run, _: Path) -> None:
            if place == "told":
                leave_once(run.progress.step)

    monkeypatch.setattr(CheckpointStore, "save", save)
    member = _fit(tmp_path / "run", Leaves(), told, **settings)
    assert member.views == 1 + len(published)
    assert made == left == published
    assert told.told == undisturbed.told
    found, expected = ((tmp_path / name / "checkpoints") for name in ("run", "undisturbed"))
    assert sorted(one.name for one in found.iterdir()) == sorted(one.name for one in expected.iterdir())
    if saves == "best":
        assert (found / "best.json").read_text() == (expected / "best.json").read_text()
    assert _records(tmp_path / "run") == _records(tmp_path / "undisturbed")


def test_whoever_becomes_rank_0_writes_the_report(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    _fit(tmp_path / "run", member=Becomes(), settings={"metrics": {"report": True, "wandb": {"mode": "disabled"}}})
    assert (tmp_path / "run" / "report.html").exists()


def test_the_summary_is_printed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _leave_in(World, "barrier", monkeypatch)
    settings = {"metrics": {"console": True, "wandb": {"mode": "disabled"}}, "checkpoint": {"every": 0}}
    member = _fit(tmp_path / "run", settings=settings)
    assert member.views == 2
    assert capsys.readouterr().out.count("done: ") == 1


def test_a_parameter_that_is_frozen_meanwhile_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, wish = nn.Linear(3, 1), _wait_to_join(monkeypatch)

    def freeze(_: Run) -> None:
        model.bias.requires_grad_(False)
        wish()

    with pytest.raises(MisuseError, match="bias was frozen while an elastic run trained"):
        _fit(tmp_path / "run", Told(3, freeze), model=model)
