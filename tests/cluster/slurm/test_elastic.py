"""Elastic jobs on two nodes, with stand-ins for the workers: the job goes on without a node, and without an agent."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import PrefixStore, TCPStore

from tests.cluster.slurm.cluster import Cluster
from tests.cluster.slurm.runs import SETTINGS, logs, submit
from tests.support.commands import ROOT

pytestmark = pytest.mark.slow

_AGENT = ROOT / "tests" / "distributed" / "workers" / "elastic_agent.py"
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


def _await(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


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
        _await(lambda: keys.add("words", 0) == 2)
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
