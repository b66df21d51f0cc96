"""The launcher of ``launch/train.sh``: one interpreter checks, then starts torchrun."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.commands import QUIET, ROOT, TINY, environment, metrics, status

LOCAL = ROOT / "launch" / "local.py"


def _start(*arguments: object, **extra: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(LOCAL), *map(str, arguments)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(**extra)
    )


@pytest.mark.slow
def test_a_mistake_is_found_before_torchrun_starts(tmp_path: Path) -> None:
    process = _start(*TINY, "trainer.max_step=1", f"hydra.run.dir={tmp_path / 'run'}")
    said, error = process.communicate(timeout=60)
    assert (process.returncode, said) == (2, "")
    (line,) = error.splitlines()
    assert line.startswith("distaccum: configuration error: trainer.max_step=1: no such setting; did you mean")
    assert status(tmp_path / "run")["state"] == "config_error"


@pytest.mark.slow
def test_a_check_alone_starts_nothing(tmp_path: Path) -> None:
    process = _start(*TINY, "--check=3", f"hydra.run.dir={tmp_path / 'run'}")
    said, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (0, "")
    assert said.startswith("check passed: GPT with ")
    assert "3 ranks x" in said
    assert said.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_that_is_asked_to_leave_saves(tmp_path: Path) -> None:
    process = _start(
        *TINY, *QUIET[2:], "checkpoint.every=100000", f"hydra.run.dir={tmp_path}", "trainer.max_steps=90000"
    )
    deadline = time.monotonic() + 100
    while not (tmp_path / "metrics.jsonl").exists() or len(metrics(tmp_path)) < 2:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=100)
    assert "check passed" not in said  # nobody asked for it
    found = status(tmp_path)
    assert found["state"] == "preempted"
    assert (tmp_path / "checkpoints" / f"step-{found['step']}").is_dir()
