"""Jobs as they are submitted: runs on two nodes, sweeps, whose elements are runs, and a chain, which continues one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.cluster.slurm.cluster import NODES, Cluster
from tests.cluster.slurm.runs import SETTINGS, STEPS, SWEEP, exact, logs, slow, submit
from tests.support.commands import ROOT, logged, status

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
