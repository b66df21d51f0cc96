"""The image's entry point, run outside of an image: what a container's exit code says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.commands import ROOT, TINY, environment, status

pytestmark = pytest.mark.slow

ENTRY = ROOT / "launch" / "container.sh"


def _start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.Popen(
        ["/bin/bash", str(ENTRY), *TINY, "metrics=jsonl", "hydra.run.dir=runs/a", *arguments],
        cwd=folder,
        env=environment(PATH=path, NPROC="2"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_container_that_is_stopped_says_that_it_was_preempted(tmp_path: Path) -> None:
    process = _start(tmp_path, "trainer.max_steps=100000", "trainer.log_every=1", "trainer.eval_every=0", "resume=auto")
    deadline, records = time.monotonic() + 120, tmp_path / "runs" / "a" / "metrics.jsonl"
    while not (records.exists() and records.read_text().count("\n") >= 3):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 75, printed
    found = status(tmp_path / "runs" / "a")
    assert (found["state"], found["reason"]) == ("preempted", "SIGTERM")
    assert (tmp_path / "runs" / "a" / "checkpoints" / f"step-{found['step']}").is_dir()
    again = _start(tmp_path, f"trainer.max_steps={found['step'] + 2}", "trainer.eval_every=0", "resume=auto")
    printed, _ = again.communicate(timeout=120)
    assert again.returncode == 0, printed
    assert "resuming" in printed


def test_another_jobs_preemption_on_the_volume_is_not_its_own(tmp_path: Path) -> None:
    """Another container saves and leaves while this one runs: both exited with 75, and the done one was run again."""
    process = _start(tmp_path, "trainer.max_steps=4", "trainer.log_every=1", "trainer.eval_every=0")
    other, records = tmp_path / "runs" / "other", tmp_path / "runs" / "a" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not records.exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    other.mkdir()
    (other / "status.json").write_text('{"state": "preempted", "step": 3, "reason": "SIGTERM"}')
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == 0, printed
    assert status(tmp_path / "runs" / "a")["state"] == "done"


def test_a_run_that_fails_is_no_preempted_one(tmp_path: Path) -> None:
    (tmp_path / "runs" / "b").mkdir(parents=True)
    (tmp_path / "runs" / "b" / "status.json").write_text('{"state": "preempted", "step": 3, "reason": "SIGTERM"}')
    os.utime(tmp_path / "runs" / "b" / "status.json", (time.time() + 600,) * 2)
    process = _start(tmp_path, "trainer.max_steps=4", "optim.lr=1e30", "trainer.eval_every=0")
    printed, _ = process.communicate(timeout=120)
    assert status(tmp_path / "runs" / "a")["state"] == "failed", printed
    assert process.returncode == 1


def test_bad_configuration_is_exit_code_2(tmp_path: Path) -> None:
    process = _start(tmp_path, "optim.lr=fast")
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == 2
    assert printed.count("configuration error") == 1
