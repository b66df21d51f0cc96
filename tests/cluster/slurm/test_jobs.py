"""Runs as jobs: on two nodes, with a mistake, and what the nodes leave behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.slurm.cluster import Cluster
from tests.cluster.slurm.runs import SETTINGS, STEPS, exact, logs, submit
from tests.support.commands import status

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
