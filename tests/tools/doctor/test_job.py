"""The job's facts, by the variables that its launchers set; keys are never shown."""

from __future__ import annotations

import json
from pathlib import Path
from time import time

import pytest

from distaccum.tools.doctor.job import job, settings
from tests.tools.doctor.here import notes, wrong

KEY = "0123456789abcdef0123456789abcdef01234567"


def test_a_key_in_the_environment_is_known_and_not_shown() -> None:
    found = job({"WANDB_API_KEY": KEY, "WANDB_MODE": "online", "HOME": "/nowhere"})
    assert found.value("W&B") == {"key": True, "mode": "online"}
    assert found.findings == []
    assert KEY not in json.dumps(found.to_json())


def test_a_key_in_a_netrc_is_of_its_host_alone(tmp_path: Path) -> None:
    (tmp_path / ".netrc").write_text(f"machine wandb.my.org login user password {KEY}\n")
    mine = {"HOME": str(tmp_path), "WANDB_BASE_URL": "https://wandb.my.org:8080/x"}
    found = job(mine)
    assert found.findings == []
    assert KEY not in json.dumps(found.to_json())
    assert notes(job({"HOME": str(tmp_path)})) == [
        "there is no key of W&B for api.wandb.ai: runs are written to disk alone (metrics.wandb.mode=offline)"
    ]


def test_online_without_a_key_is_wrong(tmp_path: Path) -> None:
    assert wrong(job({"HOME": str(tmp_path), "WANDB_MODE": "online"})) == [
        "WANDB_MODE=online, and there is no key for api.wandb.ai"
    ]
    assert job({"HOME": str(tmp_path), "WANDB_MODE": "offline"}).findings == []


@pytest.mark.parametrize(
    ("lines", "signal", "noted"),
    [
        ("#SBATCH --signal=B:USR1@120", "--signal=B:USR1@120", 0),
        ("#SBATCH --nodes=2 --signal USR1@90", "--signal=USR1@90", 0),
        ("#SBATCH --nodes=2\n# --signal=B:USR1@120", "none", 1),
    ],
)
def test_slurms_facts(lines: str, signal: str, noted: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``scontrol`` is a program that prints the job's script; a real Slurm answers in tests/cluster/slurm."""
    program = tmp_path / "scontrol"
    program.write_text(f"#!/bin/sh\n[ \"$*\" = 'write batch_script 7 -' ] && cat <<'END'\n#!/bin/bash\n{lines}\nEND\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    variables = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "n[1-2]"}
    found = job(variables | {"SLURM_JOB_END_TIME": str(int(time()) + 3600), "WANDB_MODE": "offline"})
    assert found.value("Slurm") == {"job": "7", "nodes": 2, "names": "n[1-2]", "tasks": 4, "cores": None}
    assert 3500 < found.value("time left") <= 3600
    assert [fact.text for fact in found.facts if fact.name == "signal before the limit"] == [signal]
    assert len(notes(found)) == noted
    assert wrong(found) == []
    late = job(variables | {"SLURM_JOB_END_TIME": str(int(time()) + 100), "WANDB_MODE": "offline"})
    assert any(one.startswith("Slurm ends this job in ") for one in notes(late))


@pytest.mark.parametrize(
    ("told", "left"), [("1-02:03:04", 93784), ("19:05", 1145), ("UNLIMITED", None), ("INVALID", None)]
)
def test_the_time_left_by_the_queue(
    told: str, left: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "squeue").write_text(f"#!/bin/sh\necho '{told}'\n")
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}")
    assert job({"SLURM_JOB_ID": "7"}).value("time left") == left


def test_settings_are_those_of_the_libraries_without_secrets() -> None:
    given = {"NCCL_DEBUG": "INFO", "TORCH_API_TOKEN": KEY, "HOME": "/", "OMP_NUM_THREADS": "2"}
    assert settings(given) == {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "2", "TORCH_API_TOKEN": "<redacted>"}
