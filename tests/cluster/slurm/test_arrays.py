"""Job arrays: a sweep, whose elements are runs, and a chain, whose elements continue one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.slurm.cluster import Cluster
from tests.cluster.slurm.runs import SETTINGS, STEPS, SWEEP, exact, slow, submit
from tests.support.commands import logged, status

pytestmark = pytest.mark.slow


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
