"""A sweep by Hydra's submitit launcher: a Slurm job for each of its runs, requeued where it is told to stop."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.slurm.cluster import Cluster
from tests.cluster.slurm.runs import SETTINGS, STEPS, slow
from tests.support.commands import TRAIN, logged, metrics, status, until

pytestmark = pytest.mark.heavy


def test_a_sweep_is_a_slurm_job_each_and_one_that_is_stopped_goes_on(cluster: Cluster, tmp_path: Path) -> None:
    sweep, log = tmp_path / "sweep", tmp_path / "out"
    arguments = ["-m", "hydra/launcher=slurm", f"hydra.sweep.dir={sweep}", *SETTINGS, *slow(0.1), "seed=1,2"]
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, str(TRAIN), *arguments], env=cluster.environment(NPROC="1"), stdout=file, stderr=file
        )
    try:
        until(lambda: logged(sweep / "0") >= 5 or process.poll() is not None)
        number = next((sweep / ".submitit").glob("*_0")).name
        cluster.scancel("--signal=USR2", number)  # what its time limit does, hydra.launcher.signal_delay_s before
        until(lambda: status(sweep / "0")["state"] != "running", 60)
        assert status(sweep / "0")["state"] == "preempted"
        step = status(sweep / "0")["step"]
        assert process.wait(240) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()
    assert 5 <= step < STEPS
    for run_dir, seed in ((sweep / "0", 1), (sweep / "1", 2)):
        assert status(run_dir) == {"state": "done", "step": STEPS, "reason": ""}
        assert [record["step"] for record in metrics(run_dir)] == list(range(1, STEPS + 1))
        assert f"seed: {seed}\n" in (run_dir / ".hydra" / "config.yaml").read_text()
    logs = "".join(path.read_text() for path in (sweep / ".submitit" / number).glob("*.out"))
    assert f"resuming {sweep}/0/checkpoints/step-{step} at step {step}" in logs


def test_the_reason_of_a_job_that_fails_is_told_where_the_sweep_was_started(cluster: Cluster, tmp_path: Path) -> None:
    finished = subprocess.run(
        [sys.executable, str(TRAIN), "-m", "hydra/launcher=slurm", f"hydra.sweep.dir={tmp_path}", "optim.lr=abc"],
        env=cluster.environment(NPROC="1"),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert finished.returncode == 1
    assert f"distaccum: {tmp_path}/0: torchrun ended with 1; see its status.json, or the job's log" in finished.stderr
    assert "optim.lr" in status(tmp_path / "0")["reason"]
