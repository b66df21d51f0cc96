"""Runs that are told to leave: they save, say so, leave nothing behind, and go on as if they had not been."""

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distaccum.checkpoint.store import CheckpointStore
from tests.support import wide
from tests.support.commands import ROOT, SIXTY, TRAIN, command, metrics, status, succeed
from tests.support.started import Started

SETTINGS = (*SIXTY, "checkpoint.every=25")
ENDLESS = (*SETTINGS, "trainer.max_steps=100000", "trainer.eval_every=0")
EXACT = ("step", "window", "epoch", "loss", "grad_norm", "lr", "samples", "tokens", "eval_loss")
GONE_S = 45  # torchrun gives its workers 30


def start(run_dir: Path, *arguments: object, world: int, **extra: str) -> Started:
    return Started(run_dir, command(world, TRAIN, arguments), **extra)


def _exact(run_dir: Path) -> list[list[Any]]:
    return [[record.get(key) for key in EXACT] for record in metrics(run_dir)]


def _preempt(run_dir: Path, records: int, number: signal.Signals, *arguments: object, world: int, **extra: str) -> None:
    """Sends the signal to one worker (to the only process, of one) once so many records are there."""
    started = start(run_dir, *arguments, world=world, **extra)
    os.kill(started.await_records(records)[-1], number)
    assert started.end(GONE_S) == 0, started.log.read_text()
    assert f"preempted ({number.name}): {status(run_dir)['step']} of 60 steps" in started.log.read_text()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    succeed(*SETTINGS, f"hydra.run.dir={run_dir}", world=2)
    return _exact(run_dir)


@pytest.mark.fault("SIGTERM or SIGUSR1 to one rank alone, once or twice, at any moment in any")
@pytest.mark.heavy
@pytest.mark.parametrize("times", [1, pytest.param(10, marks=pytest.mark.heavy)])
def test_preempted_at_random_moments_is_bitwise_uninterrupted(
    tmp_path: Path, whole: list[list[Any]], times: int
) -> None:
    run_dir, moments = tmp_path / "run", sorted(random.Random(times).sample(range(2, 50), times))  # noqa: S311
    for records in moments:
        number = random.Random(records).choice([signal.SIGUSR1, signal.SIGTERM])  # noqa: S311
        _preempt(run_dir, records, number, *SETTINGS, world=2)
        found = status(run_dir)
        assert (found["state"], found["reason"]) == ("preempted", number.name)
        assert records <= found["step"] < 60
        newest = CheckpointStore(run_dir / "checkpoints", keep=0).newest_valid()
        assert newest is not None
        assert newest.name == f"step-{found['step']}"
        assert _exact(run_dir) == whole[: found["step"]]  # each record once, and no record of its own
    succeed(*SETTINGS, f"hydra.run.dir={run_dir}", world=2)
    assert status(run_dir) == {"state": "done", "step": 60, "reason": ""}
    assert _exact(run_dir) == whole


@pytest.mark.heavy
@pytest.mark.parametrize("times", [1, 10])
def test_preempted_on_other_worlds_sees_the_same_samples_and_losses(tmp_path: Path, times: int) -> None:
    settings = [*(setting for setting in SETTINGS if "dropout" not in setting), "checkpoint.keep=0", wide.MODEL]
    succeed(*settings, f"hydra.run.dir={tmp_path / 'whole'}", world=2, PYTHONPATH=str(ROOT))
    run_dir, moments = tmp_path / "run", sorted(random.Random(times).sample(range(2, 50), times))  # noqa: S311
    for records, world in zip(moments, [1, 3, 2, 4, 1, 2, 3, 1, 4, 2], strict=False):
        _preempt(run_dir, records, signal.SIGUSR1, *settings, world=world, PYTHONPATH=str(ROOT))
    succeed(*settings, f"hydra.run.dir={run_dir}", world=2, PYTHONPATH=str(ROOT))
    theirs, ours = metrics(tmp_path / "whole"), metrics(run_dir)
    where = ("step", "window", "epoch", "samples", "tokens")
    assert [[record[key] for key in where] for record in ours] == [[record[key] for key in where] for record in theirs]
    assert [record["loss"] for record in ours] == pytest.approx([record["loss"] for record in theirs], rel=wide.AGREES)


@pytest.mark.fault("kill -9, SIGTERM or SIGUSR1 of torchrun")
@pytest.mark.parametrize(
    ("whom", "number"),
    [
        pytest.param("worker", signal.SIGKILL, marks=pytest.mark.heavy),
        pytest.param("launcher", signal.SIGKILL, marks=pytest.mark.heavy),
        pytest.param("launcher", signal.SIGUSR1, marks=pytest.mark.heavy),
        pytest.param("launcher", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("worker", signal.SIGTERM, marks=pytest.mark.heavy),
        pytest.param("worker", signal.SIGUSR1, marks=pytest.mark.heavy),
    ],
)
def test_nobody_is_left_behind(tmp_path: Path, whom: str, number: signal.Signals) -> None:
    """With loading processes, which are in the workers' process groups, and W&B's process beside them."""
    run_dir = tmp_path / "run"
    settings = [setting for setting in ENDLESS if setting != "metrics=jsonl"]
    started = start(run_dir, *settings, "trainer.num_workers=1", world=2)
    pids = started.await_records(5)
    assert len(pids) >= 5  # torchrun, two workers, two that load
    workers = [pid for pid in pids[1:] if "train.py" in Path(f"/proc/{pid}/cmdline").read_text()]
    os.kill(pids[0] if whom == "launcher" else workers[1], number)
    exit_code = started.end(GONE_S)
    newest = CheckpointStore(run_dir / "checkpoints", keep=0).newest_valid()
    found = status(run_dir)
    if (whom, number) == ("worker", signal.SIGKILL):
        assert exit_code == 1
        return
    assert found["state"] == "preempted", started.log.read_text()
    assert newest is not None
    assert newest.name == f"step-{found['step']}"
    assert (exit_code == 0) == (whom == "worker")


@pytest.mark.slow
@pytest.mark.fault("`trainer.max_time` is about to be over")
def test_a_run_ends_before_its_time_is_over(tmp_path: Path, says: Callable[[str], None]) -> None:
    began = time.monotonic()
    says(succeed(*ENDLESS, "trainer.max_time=4s", f"hydra.run.dir={tmp_path}").stdout)
    assert time.monotonic() - began < 60
    found = status(tmp_path)
    assert (found["state"], found["reason"]) == ("preempted", "trainer.max_time is about to be over")
    assert (tmp_path / "checkpoints" / f"step-{found['step']}").is_dir()
    assert len(metrics(tmp_path)) == found["step"] > 0


def test_preempted_without_checkpoints_says_so(tmp_path: Path) -> None:
    finished = succeed(*ENDLESS, "trainer.max_time=2s", "checkpoint.every=0", f"hydra.run.dir={tmp_path}")
    assert "checkpoint.every=0, so nothing is saved" in finished.stdout
    assert status(tmp_path)["state"] == "preempted"


@pytest.mark.heavy
def test_a_sweep_that_is_preempted_ends(tmp_path: Path) -> None:
    where = (f"hydra.sweep.dir={tmp_path}", "hydra.sweep.subdir=${seed}")
    started = start(tmp_path / "1", "-m", *ENDLESS, "seed=1,2", *where, world=2)
    os.kill(started.await_records(3)[-1], signal.SIGUSR1)
    assert started.end(GONE_S) == 0, started.log.read_text()
    assert status(tmp_path / "1")["state"] == "preempted"
    assert not (tmp_path / "2").exists()
