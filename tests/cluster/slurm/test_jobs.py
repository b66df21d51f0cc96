"""Jobs on two nodes, sweeps and chains; and what is told to stop, cancelled, preempted, or loses a node."""

import json
import re
import sys
from pathlib import Path

import pytest

from distaccum.checkpoint.store import CheckpointStore
from tests.cluster.slurm.cluster import NODES, Cluster
from tests.cluster.slurm.runs import SETTINGS, STEPS, SWEEP, exact, logs, slow, submit
from tests.support.commands import ROOT, logged, status, succeed, until

pytestmark = pytest.mark.slow


def test_a_run_on_two_nodes(cluster: Cluster, whole: Path) -> None:
    assert status(whole) == {"state": "done", "step": STEPS, "reason": ""}
    assert [record[0] for record in exact(whole)] == list(range(1, STEPS + 1))
    found = sorted(logs(whole).items())
    assert [name.split("-")[1] for name, _ in found] == ["0", "1"]  # one for each node
    assert sum("2 x cpu" in log for _, log in found) == 1, found  # rank 0 alone speaks, wherever it is
    assert cluster.command("squeue", "--noheader") == ""


def test_a_mistake_ends_the_job_at_once(cluster: Cluster, tmp_path: Path) -> None:
    job = submit(cluster, *SETTINGS, "optim.lrr=1", options=("--nodes=2",), RUN_DIR=str(tmp_path))
    assert cluster.wait(job) == "FAILED"
    assert cluster.fields(job)["ExitCode"] == "2:0"
    assert cluster.fields(job)["Restarts"] == "0"
    assert "did you mean optim.lr" in cluster.output(job)
    assert logs(tmp_path) == {}  # no process was started for it
    assert status(tmp_path)["state"] == "config_error"


def test_a_failure_is_told_and_not_repeated(cluster: Cluster, tmp_path: Path) -> None:
    job = submit(cluster, *SETTINGS, "optim=sgd", "optim.lr=1e300", RUN_DIR=str(tmp_path))
    assert cluster.wait(job) == "FAILED"
    assert cluster.fields(job)["ExitCode"] == "1:0"
    assert cluster.fields(job)["Restarts"] == "0"
    assert status(tmp_path)["state"] == "failed"
    assert "NaN or infinite" in cluster.output(job)


def test_a_sweep_runs_each_line_and_requeues_each_by_itself(cluster: Cluster, tmp_path: Path) -> None:
    lines = tmp_path / "sweep.txt"
    lines.write_text(f'optim.lr=1e-3 trainer.max_steps=3\n"optim.lr=2e-3" seed=7 {" ".join(slow(0.2))}\n')
    runs = tmp_path / "runs"
    job = submit(cluster, *SETTINGS, script=SWEEP, options=("--array=1-2",), SWEEP=str(lines), RUN_DIR=str(runs))
    cluster.wait_for(lambda: logged(runs / "2") >= 12, f"{job}_2")
    cluster.tell_to_stop(f"{job}_2")  # the last element, whose own number is the array's
    for element, (rate, seed, steps, restarts) in enumerate([("0.001", 0, 3, "0"), ("0.002", 7, STEPS, "1")], start=1):
        name, run_dir = f"{job}_{element}", runs / str(element)
        assert cluster.wait(name) == "COMPLETED", cluster.output(name)
        assert cluster.fields(name)["Restarts"] == restarts
        assert status(run_dir) == {"state": "done", "step": steps, "reason": ""}
        assert [record[0] for record in exact(run_dir)] == list(range(1, steps + 1))
        config = (run_dir / ".hydra" / "config.yaml").read_text().splitlines()
        assert {f"  lr: {rate}", f"seed: {seed}"} <= set(config)


def test_a_line_too_few_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    lines = tmp_path / "sweep.txt"
    lines.write_text("seed=1\n")
    job = submit(cluster, script=SWEEP, options=("--array=2",), SWEEP=str(lines), RUN_DIR=str(tmp_path / "runs"))
    assert cluster.wait(f"{job}_2") == "FAILED"
    assert cluster.fields(f"{job}_2")["ExitCode"] == "2:0"
    assert "no line 2; submit with --array=1-1" in cluster.output(f"{job}_2")


@pytest.mark.heavy
def test_a_chain_continues_one_run(cluster: Cluster, whole: Path, tmp_path: Path) -> None:
    options = ("--array=1-3%1", "--nodes=2")
    job = submit(cluster, *SETTINGS, *slow(0.2), options=options, RUN_DIR=str(tmp_path))
    cluster.wait_for(lambda: logged(tmp_path) >= 12, f"{job}_1")
    cluster.tell_to_stop(f"{job}_1")
    for element in (1, 2, 3):
        assert cluster.wait(f"{job}_{element}") == "COMPLETED", cluster.output(f"{job}_{element}")
        assert cluster.fields(f"{job}_{element}")["Restarts"] == "0"
    assert "the run is preempted" in cluster.output(f"{job}_1")
    assert "the run is done" in cluster.output(f"{job}_2")
    assert cluster.output(f"{job}_3").strip().endswith(f"{tmp_path} is done")
    assert status(tmp_path) == {"state": "done", "step": STEPS, "reason": ""}
    assert exact(tmp_path) == exact(whole)


def test_a_jobs_facts(cluster: Cluster, tmp_path: Path) -> None:
    for node in NODES:
        cluster.await_node(node)
    out, script = tmp_path / "told.json", tmp_path / "job.sbatch"
    program = f"{sys.executable} -m distaccum doctor --json --only job"
    script.write_text(
        f"#!/bin/bash\n#SBATCH --nodes=2 --ntasks=2 --cpus-per-task=2 --time=20 --signal=B:USR1@90\n{program} > {out}\n"
    )
    job = cluster.submit(script, PYTHONPATH=str(ROOT), WANDB_MODE="offline")
    assert cluster.wait(job) == "COMPLETED", cluster.output(job)
    told = json.loads(out.read_text())
    (section,) = [one for one in told["sections"] if one["title"] == "Job"]
    (facts,) = section["nodes"].values()
    values = {fact["name"]: fact["value"] for fact in facts}
    assert values["Slurm"] == {"job": job, "nodes": 2, "names": "n[1-2]", "tasks": 2, "cores": 2}
    assert 0 < values["time left"] <= 20 * 60
    assert values["signal before the limit"] == 90
    assert told["findings"] == []


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


@pytest.mark.fault("Slurm's time limit: SIGUSR1 before it, as `--signal=B:USR1@120` says")
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
