"""Runs that are told to stop, cancelled, preempted, or lose a node."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from distaccum.checkpoint.store import CheckpointStore
from tests.cluster.slurm.cluster import Cluster
from tests.cluster.slurm.runs import SETTINGS, STEPS, exact, logs, slow, submit
from tests.support.commands import ROOT, logged, status, succeed, until

pytestmark = pytest.mark.slow

OWN_LOOP = ROOT / "tests" / "distributed" / "workers" / "own_loop.py"
_DONE = {"state": "done", "step": STEPS, "reason": ""}


def _interruptible(
    cluster: Cluster, run_dir: Path, *settings: str, options: tuple[str, ...], seconds: float = 0.2
) -> str:
    """A job whose run has made 12 updates, saved at the tenth, and has many to go, each so long."""
    job = submit(cluster, *SETTINGS, *settings, *slow(seconds), options=options, RUN_DIR=str(run_dir))
    cluster.wait_for(lambda: logged(run_dir) >= 12 and (run_dir / "checkpoints" / "step-10").exists(), job)
    return job


def _went_on_once(cluster: Cluster, job: str, run_dir: Path) -> int:
    """The step at which a finished job was requeued, and from which its second start went on."""
    assert cluster.state(job) == "COMPLETED", cluster.output(job)
    assert cluster.fields(job)["Restarts"] == "1"
    assert status(run_dir) == _DONE
    (step,) = map(int, re.findall(r"the run is preempted at step (\d+)", cluster.output(job)))
    assert any(f"step-{step}" in log and "resuming" in log for log in logs(run_dir).values())
    return step


@pytest.mark.fault(
    "Slurm's time limit: SIGUSR1 before it, as `--signal=B:USR1@120` says",
    group="signals",
    does="saves, and is requeued; goes on bitwise",
)
def test_told_to_stop_it_saves_and_goes_on_bitwise(cluster: Cluster, whole: Path, tmp_path: Path) -> None:
    job = _interruptible(cluster, tmp_path, options=("--nodes=2",))
    cluster.tell_to_stop(job)
    cluster.wait(job)
    assert 12 <= _went_on_once(cluster, job, tmp_path) < STEPS
    assert exact(tmp_path) == exact(whole)


@pytest.mark.heavy
def test_a_loop_of_ones_own_is_requeued_and_goes_on_bitwise(cluster: Cluster, tmp_path: Path) -> None:
    """One that uses ``acc.save`` and ``acc.resume``, told to stop by the same signal."""
    weights = []
    for name, seconds in (("whole", 0), ("told", 0.3)):
        folder = tmp_path / name
        job = submit(cluster, seconds, options=("--nodes=2",), RUN_DIR=str(folder), PROGRAM=str(OWN_LOOP))
        if name == "told":
            cluster.wait_for((folder / "begun").exists, job)
            cluster.tell_to_stop(job)
        assert cluster.wait(job) == "COMPLETED", cluster.output(job)
        weights.append((folder / "checkpoints" / "step-36" / "model.safetensors").read_bytes())
    assert cluster.fields(job)["Restarts"] == "1"
    (step,) = map(int, re.findall(r"requeued at step (\d+)", cluster.output(job)))
    assert f"from step {step} on 2" in "".join(logs(folder).values())
    assert weights[0] == weights[1]


def test_cancelled_it_is_gone_and_stays_so(cluster: Cluster, tmp_path: Path) -> None:
    job = _interruptible(cluster, tmp_path, options=("--nodes=2",))
    assert len(cluster.processes(job)) >= 5  # the script, and on each node torchrun and a worker
    cluster.scancel(job)
    assert cluster.wait(job, 10) == "CANCELLED"
    until(lambda: not cluster.processes(job), 30)
    assert cluster.state(job) == "CANCELLED"
    assert cluster.fields(job)["Restarts"] == "0"
    assert "requeued" not in cluster.output(job)
    newest = CheckpointStore(tmp_path / "checkpoints", keep=2).newest_valid()
    assert newest is not None
    assert int(newest.name.removeprefix("step-")) >= 10


@pytest.mark.heavy
def test_without_one_of_its_nodes_it_goes_on_with_the_same_bits(cluster: Cluster, tmp_path: Path) -> None:
    alone, run_dir = tmp_path / "alone", tmp_path / "run"
    reproducible = ("numerics=reproducible", "model.dropout=0.1")
    job = _interruptible(cluster, run_dir, *reproducible, options=("--nodes=1-2",))
    assert cluster.fields(job)["NumNodes"] == "2"
    cluster.kill_node("n2")
    try:
        assert cluster.wait(job) == "COMPLETED", cluster.output(job)
    finally:
        cluster.start_node("n2")
        cluster.await_node("n2")
    assert cluster.fields(job)["Restarts"] == "1"
    assert cluster.fields(job)["NodeList"] == "n1"
    assert status(run_dir) == _DONE
    assert any("another world size" in log for log in logs(run_dir).values())
    succeed(*SETTINGS, *reproducible, f"hydra.run.dir={alone}", world=1, PYTHONPATH=str(ROOT))
    assert exact(run_dir) == exact(alone)
    weights = [folder / "checkpoints" / f"step-{STEPS}" / "model.safetensors" for folder in (run_dir, alone)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.heavy
def test_preempted_by_another_job_it_goes_on_bitwise(cluster: Cluster, whole: Path, tmp_path: Path) -> None:
    job = _interruptible(cluster, tmp_path, options=("--nodes=2",), seconds=1)
    urgent = cluster.submit("--partition=urgent", "--nodes=2", "--exclusive", "--wrap=sleep 1")
    assert cluster.wait(urgent) == "COMPLETED"
    cluster.wait(job)
    assert 12 <= _went_on_once(cluster, job, tmp_path) < STEPS
    assert exact(tmp_path) == exact(whole)


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_at_its_time_limit_it_goes_on_bitwise(cluster: Cluster, whole: Path, tmp_path: Path) -> None:
    options = ("--nodes=2", "--time=2", "--signal=B:USR1@30")  # Slurm sends it 30 to 90 s before the limit
    updates = slow(2.5)  # 100 s of them: more than one start can make
    job = submit(cluster, *SETTINGS, *updates, options=options, RUN_DIR=str(tmp_path), STOP_WITHIN="20")
    assert cluster.wait(job, 800) == "COMPLETED", cluster.output(job)
    assert int(cluster.fields(job)["Restarts"]) >= 1
    assert status(tmp_path) == _DONE
    assert exact(tmp_path) == exact(whole)


@pytest.mark.heavy
def test_what_does_not_save_in_time_goes_on_from_the_last_checkpoint(cluster: Cluster, tmp_path: Path) -> None:
    asleep = tmp_path / "asleep"
    stuck = (*slow(1000), f"+callbacks.slow.sleeps={asleep}")  # no second window comes
    job = submit(cluster, *SETTINGS, *stuck, options=("--nodes=2",), RUN_DIR=str(tmp_path), STOP_WITHIN="4")
    cluster.wait_for(asleep.exists, job)  # before its first window it would leave at once
    cluster.tell_to_stop(job)
    cluster.wait_for(lambda: cluster.fields(job)["Restarts"] == "1", job)
    assert "not saved within 4 s" in cluster.output(job)
    assert "requeued at step 0" in cluster.output(job)
    cluster.scancel(job)
    assert cluster.wait(job) == "CANCELLED"
