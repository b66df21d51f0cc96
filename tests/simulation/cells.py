"""Plans, faults, and a cell: attempts of one plan under faults, then one without, and what has to hold all the time."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import logging
import os
import re
import signal
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from pathlib import Path
from random import Random
from time import monotonic, time
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor, nn
from torch.testing._internal.distributed import multi_threaded_pg
from torch.utils.data import IterableDataset

from distaccum.config.schema import RunConfig
from distaccum.data.spec import DataSpec
from distaccum.distributed.environment import LaunchEnvironment
from distaccum.distributed.signals import StopSignals
from distaccum.distributed.world import World
from distaccum.errors import ConfigError, DistaccumError
from distaccum.train import run as run_module
from distaccum.train.components import TrainingComponents, build_components
from distaccum.train.coordination import JobRejectedError
from distaccum.train.parts import checkpoints
from distaccum.train.run import Launch, RunResult, Start, run
from distaccum.train.run_dir import RunDir
from tests.simulation.disk import Call, CrashedError, Disk, Job
from tests.support.threads import run_ranks

_REMOVES = ("unlink", "rmdir", "rename")
_SHM = Path("/dev/shm")  # noqa: S108  memory, as the simulation itself keeps what a disk would


# Plans


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run of a few updates."""

    steps: int = 8
    save_every: int = 2
    keep: int = 2
    log_every: int = 1
    micro: int = 4
    data: str = "samples"
    engine: str = "ddp"
    best: bool = False
    background: bool = False
    pace: int = 1  # see Job

    @property
    def waiting(self) -> Plan:
        """The same run, which waits for its saves."""
        return replace(self, background=False, pace=1)


class _Stream(IterableDataset[Any]):
    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def __iter__(self) -> Iterator[Any]:
        return islice(_samples(28), self._rank, None, self._size)


@cache
def _samples(count: int) -> list[Any]:
    generator = torch.Generator().manual_seed(5)
    return [(torch.randn(3, generator=generator), i % 2) for i in range(count)]


class _Loss:
    def count(self, batch: Any) -> int:
        return len(batch[0])

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")


@cache
def _config(plan: Plan) -> RunConfig:
    tokens = plan.data == "tokens"
    return RunConfig.from_dict(
        {
            "resume": "auto",
            "engine": plan.engine,
            "batch": {"global_size": None if tokens else 8, "tokens": 24 if tokens else None, "micro_size": plan.micro},
            "trainer": {
                "max_steps": plan.steps,
                "log_every": plan.log_every,
                "eval_every": 2 if plan.best else 0,
                "hang_timeout": None,
                "verify": "never",
            },
            "checkpoint": {
                "every": plan.save_every,
                "keep": plan.keep,
                "best": "eval_loss" if plan.best else None,
                "background": plan.background,
            },
            "metrics": {"console": False, "wandb": {"mode": "disabled"}},
        }
    )


_MODEL = nn.Linear(3, 2)
with torch.no_grad():
    for _parameter in _MODEL.parameters():
        _parameter.copy_(torch.linspace(-0.5, 0.5, _parameter.numel()).view_as(_parameter))


def _components(plan: Plan, rank: int, size: int, models: list[nn.Module]) -> TrainingComponents:
    train: Any = _Stream(rank, size) if plan.data == "stream" else _samples(28)
    model = deepcopy(_MODEL)  # ranks that are threads have one generator of random numbers
    models.append(model)
    return build_components(
        _config(plan),
        DataSpec(
            train=train,
            eval_dataset=_samples(6) if plan.best else None,
            lengths=1 + np.arange(28) % 5 if plan.data == "tokens" else None,
        ),
        model,
        _Loss(),
        world_size=size,
        device=torch.device("cpu"),
        optimizers=[torch.optim.AdamW(model.parameters(), lr=0.1)],
    )


# Faults


@dataclass(frozen=True, kw_only=True)
class At:
    """The ``number``-th call of a rank, or its ``number``-th of a kind, or of that kind on such a path."""

    number: int
    kind: str | None = None
    rank: int = 0
    path: str = ""

    def matches(self, call: Call, seen: Counter[At]) -> bool:
        """Whether it is this call; ``seen`` counts those on such a path."""
        if call.rank != self.rank or self.kind not in (None, call.kind) or self.path not in call.path:
            return False
        seen[self] += 1
        counted = call.number if self.kind is None else call.of_kind
        return (seen[self] if self.path else counted) == self.number


@dataclass(frozen=True, kw_only=True)
class Fails:
    """A call fails, and ``times - 1`` further ones of its kind and path."""

    at: At
    error: int = errno.EIO
    times: int = 1


@dataclass(frozen=True, kw_only=True)
class Crashes:
    """All processes end before a call, or after it; of a write ``share`` is done. ``power``: the machine goes down."""

    at: At
    after: bool = False
    share: float = 0.5
    power: int | None = None


@dataclass(frozen=True, kw_only=True)
class Stops:
    """A stop signal reaches the rank before a call."""

    at: At


@dataclass(frozen=True, kw_only=True)
class Visited:
    """Another run wants the folder while this one lives."""

    at: At


@dataclass(frozen=True, kw_only=True)
class Sleeps:
    """The process stands still before a call; another host takes over and trains to the end; then it goes on."""

    at: At


@dataclass(frozen=True, kw_only=True)
class Damages:
    """Between two attempts a stored file is changed: the ``file``-th of them, ``where`` its share of bytes.

    ``name`` leaves those whose names have it; ``how="lose"`` deletes them all.
    """

    file: int = 0
    name: str = ""
    how: str = "flip"
    where: float = 0.5


Fault = Fails | Crashes | Stops | Visited | Sleeps


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """A start of the run on ``size`` ranks with faults, and what is damaged after it."""

    faults: tuple[Fault, ...] = ()
    size: int = 1
    damages: tuple[Damages, ...] = ()


# What a run leaves


class ViolationError(AssertionError):
    """Something that has to hold did not."""


def tree(root: Path) -> dict[str, bytes]:
    """Every file below the folder by its name."""
    return {
        os.path.relpath(os.path.join(parent, name), root): Path(parent, name).read_bytes()
        for parent, _, names in os.walk(root)
        for name in names
    }


def intact(folder: Path) -> bool:
    """Whether a checkpoint is whole, without the product's own word for it."""
    try:
        manifest = json.loads((folder / "manifest.json").read_bytes())
        found = {name: f"blake3:{blake3(content).hexdigest()}" for name, content in tree(folder).items()}
        found.pop("manifest.json")
    except (OSError, ValueError, AttributeError):
        return False
    return isinstance(manifest, dict) and found == {name: digest for name, digest in manifest.items() if digest}


def steps(checkpoints: Path) -> list[int]:
    """The numbers of the folders ``step-N``."""
    try:
        names = os.listdir(checkpoints)
    except OSError:
        return []
    return sorted(int(name[5:]) for name in names if re.fullmatch(r"step-\d+", name))


_KEPT = ("step", "window", "epoch", "loss", "grad_norm", "lr", "applied", "skipped", "samples", "tokens", "eval_loss")


def rows(root: Path) -> list[dict[str, Any]]:
    try:
        lines = (root / "metrics.jsonl").read_bytes().splitlines()
    except FileNotFoundError:
        return []
    try:
        return [{key: record[key] for key in _KEPT if key in record} for record in map(json.loads, lines)]
    except (ValueError, TypeError) as error:
        raise ViolationError(f"metrics.jsonl is damaged: {error}") from error


@dataclass(frozen=True)
class Result:
    """What a run that ended has made."""

    weights: dict[str, Tensor]
    rows: list[dict[str, Any]]
    stored: bytes  # the last checkpoint's model


# A cell


class Cell:
    """One folder, the attempts on it, and the rules that are checked at every call."""

    def __init__(self, plan: Plan, folder: Path, screen: io.StringIO) -> None:
        self.plan, self.screen = plan, screen
        self.root = folder / "run"
        self.root.mkdir()
        self.disk = Disk(self.root)
        self.checkpoints = self.root / "checkpoints"
        self.said: list[str] = []
        self.violations: list[str] = []
        self.models: list[nn.Module] = []
        self.damaged: dict[str, bytes] = {}  # what such a file held before
        self.slept = False
        self.spoilt: dict[str, bytes | None] = {}  # and after

    # what is checked at every call

    def _check(self, call: Call, stage: str) -> None:
        """Before a call removes anything, and after it has published something."""
        parts = Path(call.path).relative_to(self.root).parts
        if stage == "before" and len(parts) >= 2:
            self._check_removal(call, parts)
        if stage == "after" and parts == ("status.json",):
            done = json.loads(Path(call.path).read_bytes())["state"] == "done"
            self._require(not done or self._at_end(), "status.json is done before the end")
        if stage == "after" and parts == ("checkpoints", "latest"):
            name = Path(call.path).read_text().strip()
            self._require(intact(self.checkpoints / name), f"latest names {name}, which is not whole")

    def _check_removal(self, call: Call, parts: Sequence[str]) -> None:
        if parts[0] != "checkpoints":
            return
        if call.kind != "rename":
            visible = re.match(r"(aside-|damaged-)?step-", parts[1])
            self._require(not visible, f"{parts[1]} is removed in its place, so that half of it may stay")
        elif len(parts) == 2 and (found := re.match(r"(damaged-|\.).*?(step-(\d+))", parts[1])):
            sort, name, number = found[1], found[2], int(found[3])
            if not (self.checkpoints / name).is_dir():
                return
            whole = intact(self.checkpoints / name)
            if sort == "damaged-":  # one that slept may have read half of the old one and half of the new
                self._require(self.slept or not whole, f"{name} is whole, and set aside as damaged")
            else:
                self._may_go(number, f"{name} is removed")

    def _may_go(self, number: int, what: str) -> None:
        newer = [
            step for step in steps(self.checkpoints) if step > number and intact(self.checkpoints / f"step-{step}")
        ]
        keep = self.plan.keep
        self._require(0 < keep <= len(newer), f"{what} while only {newer} are whole after it (keep={keep})")

    def _whole(self, step: int) -> bool:
        return intact(self.checkpoints / f"step-{step}")

    def _at_end(self) -> bool:
        if "metrics.jsonl" not in self.damaged and not any(row["step"] == self.plan.steps for row in rows(self.root)):
            return False
        return not self.plan.save_every or intact(self.checkpoints / f"step-{self.plan.steps}")

    def _require(self, condition: bool, what: str) -> None:
        if not condition:
            self.violations.append(what)

    # attempts

    def attempt(  # noqa: PLR0915  one job, and what its calls meet
        self, given: Attempt, *, host: str = "a", world: World | None = None
    ) -> list[RunResult | BaseException]:
        """What each rank gave or raised; in this thread where it is to be the only rank of an open ``world``."""
        job = Job(size=given.size, host=host, pace=self.plan.pace)
        self.disk.start(job)
        signals = [StopSignals() for _ in range(given.size)]
        failing: dict[tuple[Fails, str, str], int] = {}
        owns, must_fail = [False], [False]
        with self.disk.outside():
            newest, shown = max(filter(self._whole, steps(self.checkpoints)), default=None), self.screen.tell()
        agreement = _Agreement(given.size)
        power: list[int] = []
        seen: Counter[At] = Counter()
        ending: list[Crashes] = []

        def crash(fault: Crashes) -> None:
            job.dead = True
            if fault.power is not None:
                power.append(fault.power)
            agreement.abort()
            raise CrashedError

        def before(call: Call) -> float | None:  # noqa: PLR0912  a branch for each kind of fault
            share = None
            if call.kind == "mkdir" and call.path.endswith("/.ranks"):
                owns[0] = True
            for fault in given.faults:
                if isinstance(fault, Fails):
                    key = fault, call.kind, call.path
                    if fault.at.matches(call, seen):
                        failing[key] = fault.times
                    if failing.get(key, 0) > 0:
                        failing[key] -= 1
                        raise OSError(fault.error, os.strerror(fault.error), call.path)
                elif fault.at.matches(call, seen):
                    if isinstance(fault, Stops):
                        signals[call.rank]._handle(signal.SIGTERM, None)
                    elif isinstance(fault, Crashes):
                        if not fault.after and call.kind != "write":
                            crash(fault)
                        share = None if fault.after else fault.share
                        ending.append(fault)
                    elif owns[0] and call.rank == 0 and given.size == 1:
                        if isinstance(fault, Visited):
                            self._visit()
                        else:
                            owns[0], self.slept = False, True
                            with self.disk.outside():
                                must_fail[0] = not self._has_left()
                            self._take_over()
            if call.kind == "mkdir" and "/.saving-" in call.path:
                self._require(not self.disk.is_writing(job), "a save begins while another is being written")
            if call.kind in _REMOVES:
                with self.disk.outside():
                    self._check(call, "before")
            return share

        def after(call: Call) -> None:
            if call.kind == "rename":
                with self.disk.outside():
                    self._check(call, "after")
            if ending:
                crash(ending[0])

        job.before, job.after = before, after

        def rank(world: World) -> RunResult:
            number = world.rank
            if number == 0:
                self._world = world
            with self.disk.running(job, number):
                try:
                    start = Start(
                        make_components=lambda: _components(self.plan, number, given.size, self.models),
                        run_dir=RunDir(self.root),
                        launch=Launch(LaunchEnvironment(rank=number, size=given.size)),
                        began=monotonic(),
                        signals=signals[number],
                        agree=agreement,
                        open_group=lambda *_: nullcontext(world),
                    )
                    return run(start)
                except BaseException:
                    agreement.abort()
                    raise

        try:
            if world is None:
                results = _on_threads(given.size, rank)
            else:  # while another process stands still
                try:
                    results = [rank(world)]
                except (Exception, CrashedError) as error:
                    results = [error]
        finally:
            self.disk.end(job)
        slept = self.slept
        self.slept = slept and world is not None
        resumed = re.search(r"resuming \S+/step-(\d+) ", self.screen.getvalue()[shown:].replace("\n", " "))
        if resumed and world is None and not slept:
            self._require(int(resumed[1]) == newest, f"resumed from step {resumed[1]} while step {newest} is whole")
        if must_fail[0]:
            failed = isinstance(results[0], BaseException)
            self._require(failed, "a process that slept while another took over trained to its end")
        if power:
            self.disk.cut_power(Random(power[0]))
            if (lock := self.root / "owner.json").exists():
                os.utime(lock, (time() - 1000,) * 2)  # it took a while to come up again
        return results

    def _visit(self) -> None:
        """Another run of this host wants the folder: it is refused, and changes nothing."""
        with self.disk.outside():
            before = tree(self.root)
        state = torch.random.get_rng_state()
        (result,) = self.attempt(Attempt(), world=self._world)
        torch.random.set_rng_state(state)
        self._require(
            isinstance(result, ConfigError | JobRejectedError) and "is another run's" in str(result),
            f"a visitor: {result!r}",
        )
        with self.disk.outside():
            self._require(tree(self.root) == before, "a visitor changed the folder")

    def _has_left(self) -> bool:
        """Whether the run has nothing left to write: it has trained to its end, or has saved and left for another."""
        status = self.root / "status.json"
        preempted = status.exists() and json.loads(status.read_bytes())["state"] == "preempted"
        return preempted or intact(self.checkpoints / f"step-{self.plan.steps}")

    def _take_over(self) -> None:
        lock = self.root / "owner.json"
        with self.disk.outside():
            if lock.exists():
                os.utime(lock, (time() - 1000,) * 2)
        self.attempt(Attempt(), host="b", world=self._world)

    # damage

    def damage(self, given: Damages) -> None:
        """Changes stored files, and keeps what they held."""
        names = sorted(name for name in tree(self.root) if given.name in name)
        if given.how != "lose" and names:
            names = [names[given.file % len(names)]]
        for name in names:
            path = self.root / name
            held = path.read_bytes()
            if self.spoilt.get(name) != held:  # not by an earlier damage
                self.damaged[name] = held
            self._damage(path, given)
            self.spoilt[name] = path.read_bytes() if path.exists() else None
        if given.how == "lose":
            for folder in [*sorted(self.checkpoints.rglob("*/"), reverse=True), self.checkpoints]:
                if folder.is_dir() and not any(folder.iterdir()):
                    folder.rmdir()
        self.disk.adopt()

    def restore(self) -> None:
        """Gives the files that are still damaged what they held."""
        for name, content in self.damaged.items():
            path = self.root / name
            if (path.read_bytes() if path.exists() else None) == self.spoilt[name]:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
        self.disk.adopt()
        # A run that has gone back in between has moved records away that belong to what is restored.
        self.damaged.setdefault("metrics.jsonl", b"")

    def _damage(self, path: Path, given: Damages) -> None:
        content = path.read_bytes()
        at = int(given.where * max(0, len(content) - 1))
        if given.how in ("delete", "lose"):
            path.unlink()
        elif given.how == "truncate":
            path.write_bytes(content[:at])
        elif content:
            path.write_bytes(content[:at] + bytes([content[at] ^ (1 << (given.file % 8))]) + content[at + 1 :])
        if path.name == "owner.json" and path.exists():
            os.utime(path, (time() - 1000,) * 2)  # nobody waits for a sign of life


class _Agreement:
    """What ``agree`` is to ranks that are threads."""

    def __init__(self, size: int) -> None:
        self._barrier, self._verdicts = threading.Barrier(size), list[str | None]()

    def __call__(self, rejection: str | None) -> None:
        self._verdicts.append(rejection)
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise JobRejectedError("another rank has gone") from None
        if first := next(filter(None, self._verdicts), None):
            raise JobRejectedError(first)

    def abort(self) -> None:
        self._barrier.abort()


def _on_threads(size: int, rank: Callable[[World], RunResult]) -> list[RunResult | BaseException]:
    def guarded(world: World) -> RunResult | BaseException:
        try:
            return rank(world)
        except BaseException as error:
            multi_threaded_pg.ProcessLocalGroup.exception_handle(error)  # as a connection that closes
            return error

    return run_ranks(size, guarded)


def _result(cell: Cell) -> Result:
    path = cell.checkpoints / f"step-{cell.plan.steps}" / "model.safetensors"
    weights = {name: tensor.detach().clone() for name, tensor in cell.models[-1].state_dict().items()}
    return Result(weights, rows(cell.root), path.read_bytes() if path.exists() else b"")


@contextlib.contextmanager
def open_cell(plan: Plan) -> Iterator[Cell]:
    """A cell in a folder of its own, in memory where the machine has such a folder."""
    with (
        tempfile.TemporaryDirectory(dir=_SHM if _SHM.is_dir() else None) as name,
        contextlib.redirect_stdout(io.StringIO()) as screen,
        _listening() as said,
    ):
        cell = Cell(plan, Path(name), screen)
        cell.said = said
        with (
            cell.disk.installed(),
            patch.object(run_module, "_git_commit", lambda: None),
            patch.object(checkpoints, "_RESCUE_S", 1.0),  # for ranks that have gone
        ):
            yield cell


@contextlib.contextmanager
def _listening() -> Iterator[list[str]]:
    """What the package's loggers say at the level of warnings."""
    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logger, handler = logging.getLogger("distaccum"), Listener(logging.WARNING)
    before, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
        logger.propagate = before


@cache
def undisturbed(plan: Plan, size: int) -> Result:
    """The oracle: the plan without a fault, and without saves in the background."""
    with open_cell(plan) as cell:
        given = cell.attempt(Attempt(size=size))
        for result in given:
            if isinstance(result, BaseException):
                raise result
        assert not cell.violations, cell.violations
        return _result(cell)


_TEMPORARY = re.compile(r"(^|/)\.|\.tmp$|owner\.json$")


def simulate(plan: Plan, attempts: Sequence[Attempt]) -> str:
    """Runs a cell to its end: ``done``, or ``refused`` where what was lost had to be restored first.

    Raises:
        ViolationError: something did not hold.
    """
    with open_cell(plan) as cell:
        sizes, damaged, saved = [], cell.damaged, False
        ended = "done"
        for given in attempts:
            sizes.append(given.size)
            cell.attempt(given)
            _settle(cell)
            saved = saved or _has_saved(cell.root)
            for damage in given.damages:
                cell.damage(damage)
        size = attempts[-1].size if attempts else 1
        before, shown = tree(cell.root), cell.screen.tell()
        (first, *_) = cell.attempt(Attempt(size=size))
        _settle(cell)
        if saved and not isinstance(first, BaseException) and "resuming" not in cell.screen.getvalue()[shown:]:
            raise ViolationError("a checkpoint was saved, and the run begins at zero")
        if isinstance(first, BaseException):
            _check_refusal(cell, first, before, damaged)
            ended = "refused"
            cell.restore()
            (first, *_) = cell.attempt(Attempt(size=size))
            _settle(cell)
            if isinstance(first, BaseException):
                raise ViolationError(f"with the files restored, the run still ends with {first!r}") from first
        _check_end(cell, sizes, size, damaged)
        return ended


def _has_saved(root: Path) -> bool:
    with suppress(OSError, ValueError):
        return json.loads((root / "history.json").read_bytes())["saved"] is not None
    return False


def _settle(cell: Cell) -> None:
    if cell.violations:
        raise ViolationError("; ".join(cell.violations))


def _check_refusal(cell: Cell, error: BaseException, before: Mapping[str, bytes], damaged: Mapping[str, bytes]) -> None:
    if not damaged:
        raise ViolationError(f"without damage, an attempt without a fault ends with {error!r}") from error
    if not isinstance(error, ConfigError | DistaccumError):
        raise ViolationError(f"not an error of the run's own: {error!r}") from error
    now = tree(cell.root)
    for name, content in before.items():
        if name.startswith(("checkpoints/step-", "metrics.jsonl", "history.json")) and now.get(name) != content:
            raise ViolationError(f"an attempt that was refused changed {name}: {error}") from error


def _check_end(cell: Cell, sizes: Sequence[int], size: int, damaged: Mapping[str, bytes]) -> None:
    plan, root = cell.plan, cell.root
    state = json.loads((root / "status.json").read_bytes())
    if (state["state"], state["step"]) != ("done", plan.steps):
        raise ViolationError(f"the run returned, and its status is {state}")
    left = [name for name in tree(root) if _TEMPORARY.search(name)]
    if left:
        raise ViolationError(f"left behind: {left}")
    expected, found = undisturbed(plan.waiting, size), _result(cell)
    exact = set(sizes) <= {size}
    tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-4, "atol": 1e-5}
    for name, tensor in expected.weights.items():
        if not torch.allclose(found.weights[name], tensor, **tolerance):
            raise ViolationError(f"{name} differs from the undisturbed run's")
    if exact and found.stored != expected.stored:
        raise ViolationError("the last checkpoint's model differs from the undisturbed run's")
    _check_best(cell, expected.rows, damaged, exact=exact)
    _check_rows(cell, expected.rows, found.rows, damaged, exact=exact)
    if plan.save_every:
        kept = [step for step in steps(cell.checkpoints) if intact(cell.checkpoints / f"step-{step}")]
        if plan.steps not in kept:
            raise ViolationError("the last step is not saved")


def _check_best(cell: Cell, rows: list[dict[str, Any]], damaged: Mapping[str, bytes], *, exact: bool) -> None:
    if not cell.plan.best or not exact:
        return
    if any("checkpoints/" in name for name in damaged):
        told = any("best.json" in line for line in cell.said) or (cell.checkpoints / "best.json").exists()
        if not told:
            raise ViolationError("the best checkpoint is not known, and nobody says so")
        return
    best = json.loads((cell.checkpoints / "best.json").read_bytes())
    if not (cell.checkpoints / best["checkpoint"]).is_dir():  # announced, and never published
        best = best["before"] or best
    if best["value"] != min(row["eval_loss"] for row in rows if "eval_loss" in row):
        raise ViolationError(f"the best is {best}")
    if not intact(cell.checkpoints / best["checkpoint"]):
        raise ViolationError(f"the best one, {best['checkpoint']}, is not there")


def _check_rows(
    cell: Cell,
    expected: list[dict[str, Any]],
    found: list[dict[str, Any]],
    damaged: Mapping[str, bytes],
    *,
    exact: bool,
) -> None:
    steps_found = [row["step"] for row in found]
    if "metrics.jsonl" in damaged:
        missing = [row for row in expected if row["step"] not in steps_found]
        told = any("metrics.jsonl" in line for line in cell.said)
        if missing and not told:
            raise ViolationError(f"rows of steps {[row['step'] for row in missing]} are lost, and nobody says so")
        if len(set(steps_found)) < len(steps_found):
            raise ViolationError(f"rows come twice: {steps_found}")
        return
    if steps_found != [row["step"] for row in expected]:
        raise ViolationError(f"rows of steps {steps_found}, not {[row['step'] for row in expected]}")
    for one, other in zip(found, expected, strict=True):
        different = {key: (one.get(key), value) for key, value in other.items() if one.get(key) != value}
        if not exact:
            different = {k: v for k, v in different.items() if k not in ("loss", "grad_norm", "eval_loss")}
        if different:
            raise ViolationError(f"the row of step {one['step']}: {different}")
