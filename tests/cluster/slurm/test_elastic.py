"""Elastic jobs on two nodes, of which one is lost: with stand-ins for the workers, and a run that takes it in again."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed import PrefixStore, TCPStore

from tests.cluster.slurm.cluster import Cluster
from tests.cluster.slurm.runs import SETTINGS, STEPS, exact, logs, slow, submit
from tests.support.commands import ROOT, logged, metrics, status, succeed, until

pytestmark = pytest.mark.slow

_AGENT = ROOT / "tests" / "elastic" / "workers" / "elastic_agent.py"
_PYTHON = """\
#!/bin/bash
if [ "$1 $2" = "-m distaccum.elastic" ]; then
    shift 2
    set -- {agent} "$@"
fi
exec {python} "$@"
"""


@pytest.fixture
def stand_ins(tmp_path: Path) -> dict[str, str]:
    """The variables of a job whose agents start stand-ins."""
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(_PYTHON.format(agent=_AGENT, python=sys.executable))
    python.chmod(0o755)
    (tmp_path / "members").mkdir()
    return {
        "DISTACCUM_ENV": f"venv:{tmp_path / 'venv'}",
        "STANDIN": str(tmp_path / "members"),
        "RUN_DIR": str(tmp_path / "run"),
        "PYTHONPATH": str(ROOT),
        "ELASTIC": "1",
    }


def _keys(member: Path) -> PrefixStore:
    told = json.loads(json.loads(member.read_text())["variables"]["DISTACCUM_ELASTIC"])
    return PrefixStore(told["prefix"], TCPStore(*told["store"], is_master=False, wait_for_workers=False))


@pytest.mark.heavy
def test_it_goes_on_without_a_node_and_an_agent_that_is_killed_comes_back(
    cluster: Cluster, tmp_path: Path, stand_ins: dict[str, str]
) -> None:
    members, run_dir = tmp_path / "members", tmp_path / "run"
    job = submit(cluster, *SETTINGS, options=("--nodes=2", "--no-kill"), **stand_ins)
    for name in ("0.0.1", "1.0.1"):
        cluster.wait_for((members / name).exists, job)
    keys = _keys(members / "0.0.1")

    agent = int(json.loads((members / "1.0.1").read_text())["variables"]["DISTACCUM_LAUNCHER"])
    os.kill(agent, signal.SIGKILL)
    cluster.wait_for((members / "1.0.2").exists, job)
    assert json.loads(keys.get("word/1")) == {"member": "1.0.1", "how": "has died with its agent"}
    assert any("was killed, and is started again" in log for log in logs(run_dir).values())

    node = json.loads((members / "1.0.2").read_text())["variables"]["SLURMD_NODENAME"]
    assert node == "n2"  # the store is on the other
    keys.set("view/1", json.dumps({"generation": 1, "members": ["0.0.1", "1.0.2"]}))
    cluster.kill_node(node)
    try:
        until(lambda: keys.add("words", 0) == 2)
        word = {"member": "1.0.2", "how": "is on node 1, whose agent has been silent for 10 s"}
        assert json.loads(keys.get("word/2")) == word
        time.sleep(15)  # Slurm has found the node down
        assert cluster.state(job) == "RUNNING", cluster.output(job)
        (run_dir / "status.json").write_text('{\n  "state": "done",\n  "step": 40,\n  "reason": ""\n}\n')
        keys.set("ended", "0")
        (members / "0.0.1.exit").write_text("0")
        assert cluster.wait(job) == "COMPLETED", cluster.output(job)
    finally:
        cluster.start_node(node)
        cluster.await_node(node)


def _ranks(run_dir: Path) -> int:
    return int(metrics(run_dir)[-1]["ranks"])


@pytest.mark.heavy
@pytest.mark.timeout(400)
def test_a_run_goes_on_without_a_node_and_takes_it_in_again(cluster: Cluster, tmp_path: Path) -> None:
    alone, run_dir, port = tmp_path / "alone", tmp_path / "run", str(random.randint(20000, 29999))  # noqa: S311
    reproducible = ("numerics=reproducible", "model.dropout=0.1")
    settings = (*SETTINGS, *reproducible, *slow(1.0))
    options = ("--nodes=2", "--no-kill")
    job = submit(cluster, *settings, options=options, RUN_DIR=str(run_dir), ELASTIC="1", RDZV_PORT=port)
    cluster.wait_for(lambda: logged(run_dir) >= 3, job)
    assert _ranks(run_dir) == 2
    cluster.kill_node("n2")
    cluster.wait_for(lambda: _ranks(run_dir) == 1, job)
    cluster.start_node("n2")
    cluster.wait_for(lambda: cluster.node_state("n2") in ("ALLOCATED", "MIXED"), job)  # it is the job's still
    agent = (sys.executable, "-m", "distaccum.elastic", "--nproc=1", "--nnodes=2", "--node-rank=1")
    step = ("--jobid", job, "--overlap", "--nodes=1", "--ntasks=1", "--nodelist=n2", "--cpu-bind=none")
    command = ["srun", *step, *agent, f"--rdzv=127.0.0.1:{port}", *settings]
    again = subprocess.Popen(command, env=cluster.environment(PYTHONPATH=str(ROOT)), cwd=ROOT)
    try:
        cluster.wait_for(lambda: _ranks(run_dir) == 2, job)
        assert cluster.wait(job, 200) == "COMPLETED", cluster.output(job)
        assert again.wait(60) == 0
    finally:
        again.kill()
    assert cluster.fields(job)["Restarts"] == "0"
    assert status(run_dir) == {"state": "done", "step": STEPS, "reason": "", "ranks": 2}
    succeed(*SETTINGS, *reproducible, f"hydra.run.dir={alone}", world=1, PYTHONPATH=str(ROOT))
    assert exact(run_dir) == exact(alone)
    weights = [folder / "checkpoints" / f"step-{STEPS}" / "model.safetensors" for folder in (run_dir, alone)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
