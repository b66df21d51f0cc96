"""What a view of an elastic run leaves to the next one: here one process is in all of them, and ends them itself."""

import gc
import json
import math
import os
import signal
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from distaccum import DataSpec, RunConfig
from distaccum.accumulation.accumulator import Accumulator
from distaccum.accumulation.step import Outcome
from distaccum.accumulation.tracker import ProgressTracker
from distaccum.checkpoint.store import CheckpointStore
from distaccum.distributed.environment import LaunchEnvironment
from distaccum.distributed.world import World
from distaccum.elastic.engine.builder import ElasticEngines
from distaccum.elastic.engine.shares import LostStateError
from distaccum.elastic.group.member import Member
from distaccum.elastic.group.membership import ExpelledError
from distaccum.elastic.group.polled_group import ViewChangedError
from distaccum.elastic.group.views import Report, View
from distaccum.elastic.run import going_on
from distaccum.elastic.run.carried import Carried
from distaccum.elastic.run.joining import JoinHook
from distaccum.elastic.run.launch import ElasticLaunch
from distaccum.elastic.run.loop import ElasticLoop
from distaccum.elastic.run.standstill import StandstillError
from distaccum.elastic.run.views import Successor
from distaccum.engines.optimizer_step import OptimizerStep
from distaccum.errors import ConfigError, MisuseError, NonFiniteError, SpikeError
from distaccum.tools import diagnose
from distaccum.train import owner
from distaccum.train import run as run_module
from distaccum.train.callbacks import Callback, Run
from distaccum.train.components import build_components
from distaccum.train.loop import Loop
from distaccum.train.metrics.meter import Meter
from distaccum.train.owner import Machine
from distaccum.train.run import Start, run
from distaccum.train.run_dir import RunDir, State
from tests.unit.train.test_owner import ELSEWHERE, _write
from tests.unit.train.test_skips import SQUARES

pytestmark = pytest.mark.usefixtures("gloo_world")
_NAME = "0.0.1"
_TIMES = ("_per_s", "_s", "_bytes")


class Alone:
    """A member of views that nobody else is in."""

    name, rank, is_first = _NAME, 0, True
    told: Mapping[str, Any] = {}

    def __init__(self, *, left_out: bool = False) -> None:
        self.membership = SimpleNamespace(wishes=lambda: False, is_left_out=lambda: left_out, expel_after_s=30.0)
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

    def lost_at_start(self, _: int) -> str:
        return ""


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


@dataclass
class Program:
    model: Callable[[], nn.Module] = lambda: nn.Linear(3, 1)
    loss: Any = SQUARES
    optimizer: Callable[[Any], Optimizer] | None = None
    evaluates: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)


def _fit(
    folder: Path,
    *told: Callback,
    bad: tuple[int, ...] = (),
    by: float = math.inf,
    program: Program | None = None,
    member: Alone | None = None,
    **trainer: Any,
) -> Alone:
    """Trains on 16 windows of two samples; those of the windows ``bad`` are ``by`` too large."""
    torch.manual_seed(0)
    program = program or Program()
    samples = list(torch.randn(32, 3))
    for window in bad:
        samples[2 * window - 2] = samples[2 * window - 2] * by
    config = RunConfig.from_dict(
        {
            "batch": {"global_size": 2, "micro_size": 1},
            "trainer": {"max_steps": None, "max_epochs": 1, "log_every": 1, "verify": "never", **trainer},
            "metrics": {"console": False, "wandb": {"mode": "disabled"}},
            "numerics": "reproducible",
            **program.settings,
        }
    )
    held_out = list(torch.randn(6, 3)) if program.evaluates else None
    model, member = program.model(), member or Alone()
    start = Start(
        make_components=lambda: build_components(
            config,
            DataSpec(train=samples, eval_dataset=held_out, description="numbers", shuffle=False),
            model,
            program.loss,
            optimizers=() if program.optimizer is None else [program.optimizer(model.parameters())],
            world_size=1,
            device=torch.device("cpu"),
            callbacks=told,
            builder=ElasticEngines(),
        ),
        run_dir=RunDir(folder),
        launch=ElasticLaunch(cast(Member, member)),
        began=time.monotonic(),
    )
    run(start)
    return member


def _records(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if not key.endswith(_TIMES)} for line in lines]


def _leave(*_: object, **__: object) -> Any:
    raise ViewChangedError("a member is gone")


def _leave_in(
    owner: Any, name: str, patch: pytest.MonkeyPatch, *, at: int = 1, error: Exception | None = None
) -> list[int]:
    """Has the ``at``-th call of a function be the end of the view; the list grows with each call."""
    inner, calls = getattr(owner, name), list[int]()

    def outer(*given: Any, **named: Any) -> Any:
        calls.append(len(calls) + 1)
        if calls[-1] != at:
            return inner(*given, **named)
        raise error or ViewChangedError("a member is gone")

    patch.setattr(owner, name, outer)
    return calls


def _wait_to_join(patch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A function after which the next count ends the view."""
    wished = list[float]()
    patch.setattr(JoinHook, "outgoing", lambda *_: [wished.pop() if wished else 0.0])
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
    calls = _leave_in(diagnose, name, monkeypatch)
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
    carried = ElasticLoop.carried

    def noted(loop: Loop) -> Carried:
        found = carried(loop)
        kept = {} if found.begun is None else found.begun.kept.sums
        held.extend(weakref.ref(one) for one in (found, *found.engine.model.values(), *found.engine.optimizer.values()))
        held.extend(weakref.ref(one) for sums in kept.values() for one in sums)
        return found

    monkeypatch.setattr(ElasticLoop, "carried", noted)

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


class Branches(nn.Module):
    """A branch that each other window takes."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, batch: Tensor) -> Tensor:
        out: Tensor = self.always(batch)
        return out + self.sometimes(batch) if bool(batch.sum() > 0) else out


def test_a_parameter_is_used_by_sums_that_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left to compute: without a word of what the sums depend on no parameter would move."""
    program = Program(Branches, settings={"engine": {"find_unused_parameters": True}})
    _fit(tmp_path / "undisturbed", Told(), program=program)
    for place, name in ((ProgressTracker, "begin_step"), (OptimizerStep, "step")):
        for at in (4, 5, 6):
            folder = tmp_path / f"{name}-{at}"
            with monkeypatch.context() as patch:
                _leave_in(place, name, patch, at=at)
                member = _fit(folder, Told(), program=program)
            assert member.views == 2
            assert _records(folder) == _records(tmp_path / "undisturbed")


class Begins(SGD):
    """Its first step is larger, which it notes in its groups."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            rate = 1.0 if group.setdefault("begun", False) else 3.0
            group["begun"] = True
            for parameter in group["params"]:
                with torch.no_grad():
                    parameter.sub_(rate * group["lr"] * parameter.grad)


def test_what_an_optimizer_adds_to_its_groups_is_state_in_later_views(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wish = _wait_to_join(monkeypatch)
    saved = list[dict[str, Any]]()

    class Saves(Told):
        def on_checkpoint(self, run: Run, path: Path) -> None:
            saved.append(json.loads((path / "state.json").read_text())["optimizer_values"])

    program = Program(optimizer=lambda p: Begins(p, lr=0.01), settings={"checkpoint": {"every": 10}})
    _fit(tmp_path / "undisturbed", Saves(), program=program)
    member = _fit(tmp_path / "run", Saves(4, lambda _: wish()), program=program)
    assert member.views == 2
    half = len(saved) // 2
    assert half
    assert saved[half:] == saved[:half]
    assert _records(tmp_path / "run") == _records(tmp_path / "undisturbed")


class Kinds:
    """Two losses; a batch counts those that it has samples of."""

    def count(self, batch: Tensor) -> dict[str, int]:
        found = {"large": int((batch[:, 2] > 0).sum()), "small": int((batch[:, 2] <= 0).sum())}
        return {name: count for name, count in found.items() if count}

    def __call__(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        squares, large = model(batch).square().flatten(), batch[:, 2] > 0
        return {"large": squares[large].sum(), "small": squares[~large].sum()}


@pytest.mark.parametrize("place", ["window", "reduction"])
def test_what_batches_count_is_known_in_later_views(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some windows lack a name, and nothing is computed again of one that goes on."""
    program = Program(loss=Kinds())
    _fit(tmp_path / "undisturbed", Told(), program=program)
    records = _records(tmp_path / "undisturbed")
    assert len(records) == 16
    for window in range(2, 9):
        folder = tmp_path / f"run-{window}"
        with monkeypatch.context() as patch:
            if place == "reduction":
                _leave_in(ProgressTracker, "begin_step", patch, at=window)
                member = _fit(folder, Told(), program=program)
            else:
                wish = _wait_to_join(patch)
                member = _fit(folder, Told(window, lambda _, wish=wish: wish()), program=program)  # type: ignore[misc]
        assert member.views == 2
        assert _records(folder) == records


@pytest.mark.parametrize("heard", [True, False])
def test_a_stop_stays_though_the_rank_is_lost_that_asked(
    heard: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one rank alone knows goes with it; where nobody has ``heard`` its reason the run may have been preempted."""
    take_reasons = Loop.agree_on_the_end

    def take(loop: Loop) -> None:
        if heard:
            take_reasons(loop)
        loop.reason = ""
        monkeypatch.setattr(Loop, "agree_on_the_end", take_reasons)
        _leave()

    monkeypatch.setattr(Loop, "agree_on_the_end", take)
    program = Program(settings={"checkpoint": {"every": 100}})
    member = _fit(tmp_path / "run", Told(6, lambda run: run.stop("enough")), program=program)
    assert member.views == 2
    assert [one["window"] for one in _records(tmp_path / "run")] == [*range(1, 7)]
    expected = ("done", "enough") if heard else ("preempted", "a rank that is lost asked to stop")
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["reason"]) == expected


def test_an_evaluation_at_the_end_stands_in_the_record_and_is_the_best_though_a_rank_is_lost_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = Program(evaluates=True, settings={"checkpoint": {"every": 100, "best": "eval_loss"}})
    trainer: dict[str, Any] = {"log_every": 4, "eval_every": 4}

    class Evaluated(Told):
        def on_eval(self, run: Run, results: Mapping[str, float]) -> None:
            self._tell("eval", run)
            if run.progress.window == 6 and lost:  # by the others, once all were told
                lost.pop()
                _leave_in(World, "all_reduce_max_host", monkeypatch)

    lost = list[int]()
    _fit(tmp_path / "undisturbed", one := Evaluated(6, lambda run: run.stop("enough")), program=program, **trainer)
    lost = [1]
    member = _fit(tmp_path / "run", Evaluated(6, lambda run: run.stop("enough")), program=program, **trainer)
    assert member.views == 2
    assert ("eval", 6) in one.told
    assert "eval_loss" in _records(tmp_path / "undisturbed")[-1]
    assert _records(tmp_path / "run") == _records(tmp_path / "undisturbed")
    best = [next((tmp_path / name).rglob("best.json")).read_text() for name in ("undisturbed", "run")]
    assert best[0] == best[1]


def test_an_evaluation_without_training_is_recorded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, trainer = Program(evaluates=True), {"max_steps": 0, "max_epochs": None}
    _fit(tmp_path / "undisturbed", Told(), program=program, **trainer)
    _leave_in(Accumulator, "close", monkeypatch)
    member = _fit(tmp_path / "run", Told(), program=program, **trainer)
    assert member.views == 2
    assert len(_records(tmp_path / "undisturbed")) == 1
    assert _records(tmp_path / "run") == _records(tmp_path / "undisturbed")


def test_the_end_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Ends(Told):
        def on_end(self, run: Run, _: Mapping[str, float]) -> None:
            self._tell("end", run)

    told = Ends()
    _leave_in(Accumulator, "close", monkeypatch)
    member = _fit(tmp_path / "run", told)
    assert member.views == 2
    assert told.told.count(("end", 16)) == 1


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
    settings: dict[str, Any] = {"program": Program(evaluates=True, settings=_SAVES[saves]), "eval_every": 4}
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
    settings = {"metrics": {"report": True, "wandb": {"mode": "disabled"}}}
    _fit(tmp_path / "run", member=Becomes(), program=Program(settings=settings))
    assert (tmp_path / "run" / "report.html").exists()


def test_the_summary_is_printed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _leave_in(World, "barrier", monkeypatch)
    settings: dict[str, Any] = {"metrics": {"console": True, "wandb": {"mode": "disabled"}}, "checkpoint": {"every": 0}}
    member = _fit(tmp_path / "run", program=Program(settings=settings))
    assert member.views == 2
    assert capsys.readouterr().out.count("done: ") == 1


def test_a_parameter_that_is_frozen_meanwhile_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, wish = nn.Linear(3, 1), _wait_to_join(monkeypatch)

    def freeze(_: Run) -> None:
        model.bias.requires_grad_(False)
        wish()

    with pytest.raises(MisuseError, match="bias was frozen while an elastic run trained"):
        _fit(tmp_path / "run", Told(3, freeze), program=Program(lambda: model))


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("resume", "resume={}: there is no checkpoint of this run that is whole; 4 windows are"),
        (
            "init_from",
            "the beginning, with init_from={}: there is no checkpoint of this run that is whole; 8 windows are",
        ),
    ],
)
def test_a_run_that_goes_back_to_its_beginning_names_what_it_begins_with(
    setting: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _fit(tmp_path / "other", program=Program(settings={"checkpoint": {"every": 4, "keep": 0}}))
    begins = str(tmp_path / "other" / "checkpoints" / "step-4")
    program = Program(settings={setting: begins, "checkpoint": {"every": 1000}})
    _fit(tmp_path / "undisturbed", program=program)
    at = 5 if setting == "resume" else 9
    _leave_in(ProgressTracker, "begin_step", monkeypatch, at=at)
    _leave_in(going_on, "hand_over", monkeypatch, at=2, error=LostStateError("a part is gone"))
    member = _fit(tmp_path / "run", program=program)
    assert member.views == 3
    assert f"1 rank goes on from {said.format(begins)} computed again" in caplog.text
    assert _records(tmp_path / "run") == _records(tmp_path / "undisturbed")


def _raises(error: Exception) -> Callable[[Run], None]:
    def act(_: Run) -> None:
        raise error

    return act


@pytest.mark.parametrize("error", [OSError(116, "Stale file handle"), MisuseError("late and wrong")], ids=repr)
def test_a_late_error_of_a_member_that_was_left_out_is_its_own(
    error: Exception, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ExpelledError, match="go on without member") as raised:
        _fit(tmp_path, Told(3, _raises(error)), member=(alone := Alone(left_out=True)))
    assert raised.value.__cause__ is error
    assert str(error) in caplog.text
    assert alone.codes == []
    assert RunDir(tmp_path).failure() == ""
    assert RunDir(tmp_path).state() is State.RUNNING


def test_an_error_of_a_member_that_is_in_the_view_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(MisuseError):
        _fit(tmp_path, Told(3, _raises(MisuseError("wrong"))), member=(alone := Alone()))
    assert alone.codes == [1]
    assert RunDir(tmp_path).state() is State.FAILED


def test_what_a_rank_that_was_left_behind_noted_late_is_forgotten_at_the_end(tmp_path: Path) -> None:
    _fit(tmp_path, Told(16, lambda _: RunDir(tmp_path).write_failure("rank 1: OSError: stale")))
    assert RunDir(tmp_path).status() | {"ranks": 1} == {"state": "done", "step": 16, "reason": "", "ranks": 1}


def test_a_view_that_is_given_up_at_the_same_place_again_and_again_ends_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def wait(_: Run) -> None:
        raise ViewChangedError(
            "what another member owes has not come, and the others wait for 30 s (elastic.expel_after)"
        )

    class Waits(Told):
        def on_update(self, run: Run, _: Outcome) -> None:
            if run.progress.window > 3:
                wait(run)

    alone = Alone()
    with pytest.raises(StandstillError, match=r"3 times for longer than elastic\.expel_after=30 s"):
        _fit(tmp_path, Waits(), member=alone)
    assert alone.views == 4
    assert alone.codes == [1]
    assert caplog.text.count("WARNING") == 3
    assert "StandstillError" in RunDir(tmp_path).failure()


def test_the_members_decide_by_the_signal_that_was_received(tmp_path: Path) -> None:
    member = _fit(tmp_path, Told(3, lambda _: os.kill(os.getpid(), signal.SIGTERM)))
    assert member.membership.told_to_leave() == "SIGTERM"
    assert RunDir(tmp_path).state() is State.PREEMPTED


def test_an_owner_that_was_given_up_cannot_write_into_the_records(tmp_path: Path) -> None:
    before, after = RunDir(tmp_path), RunDir(tmp_path)
    with before.own(), before.metrics.open("a") as file:
        file.write("1\n")
        file.flush()
        after.token = before.token
        with after.own(Successor(after, 1)):
            file.write("2\n")
            file.flush()
            with after.metrics.open("a") as newer:
                newer.write("3\n")
            assert after.metrics.read_text() == "1\n3\n"


@pytest.mark.parametrize("machine", [Machine.here(), ELSEWHERE], ids=["here", "elsewhere"])
def test_the_first_rank_of_a_later_view_takes_over_from_one_that_told_nobody(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in {"RANK": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "29400", "TORCHELASTIC_RUN_ID": "a1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    before: dict[str, object] = {"machine": machine, "pid": os.getppid()}
    if machine != ELSEWHERE:  # it lives, and is stopped
        before["started"] = owner.process_start(os.getppid())
    _write(tmp_path, age=0, **before, generation=1)
    for generation in (0, 1):  # an older first rank that wakes takes nothing from a later one
        with pytest.raises(ConfigError, match="another run's"), Successor(RunDir(tmp_path), generation):
            pass
    with Successor(RunDir(tmp_path), 2) as held:
        assert owner.read_holder(tmp_path) == held.holder
    assert "was first in generation 1 of this run: taken over" in caplog.text
    _write(tmp_path, age=0, **before, generation=1, launch="n1 29400 another")
    with pytest.raises(ConfigError, match="another run's"), Successor(RunDir(tmp_path), 2):
        pass
