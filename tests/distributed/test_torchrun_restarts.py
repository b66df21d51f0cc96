"""Torchrun's own restarts: the same command goes on from the newest checkpoint, on as many ranks as are left."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import wide
from tests.support.commands import (
    ROOT,
    TINY,
    TRAIN,
    environment,
    family,
    free_port,
    logged,
    metrics,
    status,
    succeed,
    until,
)

pytestmark = pytest.mark.slow

SETTINGS = (
    *TINY,
    "batch.global_size=10",
    "batch.micro_size=2",
    "trainer.max_steps=60",
    "metrics=jsonl",
    "trainer.log_every=1",
    "trainer.eval_every=0",
    "checkpoint.every=10",
    "resume=auto",
    wide.MODEL,
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    run_dir = tmp_path_factory.mktemp("whole")
    succeed(*SETTINGS, f"hydra.run.dir={run_dir}", world=2, PYTHONPATH=str(ROOT))
    return metrics(run_dir)


def _agent(log: Path, run_dir: Path, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(TRAIN), *SETTINGS]
    command.append(f"hydra.run.dir={run_dir}")
    with log.open("w") as file:
        return subprocess.Popen(command, env=environment(PYTHONPATH=str(ROOT)), stdout=file, stderr=subprocess.STDOUT)


def _kill(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.heavy
def test_a_worker_that_is_killed_is_started_again(tmp_path: Path, whole: list[dict[str, Any]]) -> None:
    run_dir = tmp_path / "run"
    agent = _agent(tmp_path / "out", run_dir, "--standalone", "--max-restarts=1", "--nproc-per-node=2")
    until(lambda: logged(run_dir) >= 25, pause_s=0.005)
    _kill(family(agent.pid)[1:2])
    assert agent.wait(120) == 0, (tmp_path / "out").read_text()
    assert status(run_dir) == {"state": "done", "step": 60, "reason": ""}
    assert "resuming" in (tmp_path / "out").read_text()
    exact = ("step", "window", "epoch", "loss", "grad_norm", "lr", "samples", "tokens")
    assert [[r[key] for key in exact] for r in metrics(run_dir)] == [[r[key] for key in exact] for r in whole]


@pytest.mark.heavy
def test_the_ranks_that_are_left_go_on_with_the_same_global_batch(tmp_path: Path, whole: list[dict[str, Any]]) -> None:
    """Two agents, of which one is killed with its worker."""
    run_dir, logs = tmp_path / "run", [tmp_path / "first", tmp_path / "second"]
    options = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-id=elastic"]
    options.append(f"--rdzv-endpoint=127.0.0.1:{free_port()}")
    first, second = (
        _agent(log, run_dir, *options, f"--rdzv-conf=is_host={host},last_call_timeout=10")
        for log, host in zip(logs, ("true", "false"), strict=True)
    )
    try:
        until(lambda: logged(run_dir) >= 25, pause_s=0.005)
        _kill(family(second.pid))
        assert first.wait(200) == 0, logs[0].read_text()
    finally:
        for agent in (first, second):
            if agent.poll() is None:
                _kill(family(agent.pid))
            agent.wait()
    printed = "".join(log.read_text() for log in logs)
    assert "world      2 x cpu" in printed
    assert "world      1 x cpu" in printed
    assert status(run_dir)["state"] == "done"
    where = ("step", "window", "epoch", "samples", "tokens")
    assert [[r[key] for key in where] for r in metrics(run_dir)] == [[r[key] for key in where] for r in whole]
    assert [r["loss"] for r in metrics(run_dir)] == pytest.approx([r["loss"] for r in whole], rel=wide.AGREES)
