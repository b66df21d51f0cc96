"""The doctor in a job of a real Slurm: the job's facts, and the signal that its script asks for."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.cluster.slurm.cluster import NODES, Cluster
from tests.support.commands import ROOT

pytestmark = pytest.mark.slow


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
