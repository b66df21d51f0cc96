"""Each finding of the machine and the job made true; a probe that hangs, raises or crashes is a row."""

import json
import os
import resource
import signal
import subprocess
from pathlib import Path
from time import monotonic, sleep, time

import pytest
import torch

from distaccum.distributed.watchdog import DIED, trouble_of
from distaccum.tools.doctor.facts import Finding, Look
from distaccum.tools.doctor.host import host
from distaccum.tools.doctor.job import job, settings
from distaccum.tools.doctor.limits import Probe, look
from tests.support.commands import until
from tests.tools.doctor.here import looked, mount, needs_mounts, notes, wrong

SHARED = Path("/dev/shm")  # noqa: S108  what is looked at
CORES = len(os.sched_getaffinity(0))


def _host(**given: int) -> Look:
    return host(local_ranks=given.get("local_ranks", 1), cpu_trains=True)


def _about(found: list[str], word: str) -> list[str]:
    return [one for one in found if word in one]


@pytest.mark.parametrize(
    ("files", "is_wrong", "is_note"), [(512, True, False), (2000, False, True), (4096, False, False)]
)
def test_open_files(files: int, is_wrong: bool, is_note: bool) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    found = looked(_host, after=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard)))
    assert found.value("open files (ulimit -n)") == files
    assert len(_about(wrong(found), f"may open {files} files")) == is_wrong
    assert len(_about(notes(found), f"may open {files} files")) == is_note
    if is_wrong or is_note:
        (mend,) = [one.mend for one in found.findings if "may open" in one.what]
        limit = int(mend.removeprefix("ulimit -n "))
        mended = looked(_host, after=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard)))
        assert _about([*wrong(mended), *notes(mended)], "may open") == []


def test_threads_and_processes() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    found = looked(_host, after=lambda: resource.setrlimit(resource.RLIMIT_NPROC, (1000, hard)))
    assert _about(wrong(found), "1000 processes and threads may run")


@needs_mounts
def test_a_small_dev_shm() -> None:
    found = looked(_host, after=lambda: mount(SHARED, "64m"))
    assert found.value(str(SHARED)) == {"bytes": 64 * 2**20, "free": 64 * 2**20}
    assert _about(wrong(found), f"{SHARED} has 64.0 MiB: loading processes")


@needs_mounts
def test_a_full_dev_shm(monkeypatch: pytest.MonkeyPatch) -> None:
    """In small: a file system of a GiB takes a GiB to fill."""
    monkeypatch.setattr("distaccum.tools.doctor.host._SHARED_WANTED", 2**23)
    monkeypatch.setattr("distaccum.tools.doctor.host._SHARED_FREE_WANTED", 2**22)

    def fill() -> None:
        mount(SHARED, "8m")
        (SHARED / "left").write_bytes(bytes(6 * 2**20))

    assert _about(wrong(looked(_host, after=fill)), f"{SHARED} has 2.0 MiB left of 8.0 MiB")


def test_more_threads_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", str(4 * CORES))
    found = looked(lambda: _host(local_ranks=2), after=lambda: torch.set_num_threads(4 * CORES))
    assert found.value("threads of a rank") == 4 * CORES
    (one,) = [one for one in found.findings if "take turns" in one.what]
    assert one.what == f"2 x {4 * CORES} threads take turns on {CORES} cores: OMP_NUM_THREADS={4 * CORES}"
    assert one.wrong
    assert one.mend == f"export OMP_NUM_THREADS={max(1, CORES // 2)}"
    found = looked(lambda: _host(local_ranks=2), after=lambda: torch.set_num_threads(1))
    assert not [one for one in found.findings if "take turns" in one.what]


def _of(root: Path, files: dict[str, str]) -> Look:
    """Of a machine with these files."""
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return looked(lambda: host(local_ranks=1, cpu_trains=True, root=root))


def test_control_groups_limit_cores_memory_and_processes(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/job/step\n",
        "proc/meminfo": f"MemTotal: {64 * 2**20} kB\nMemAvailable: {20 * 2**20} kB\n",
        "sys/fs/cgroup/job/cpu.max": "50000 100000\n",
        "sys/fs/cgroup/job/step/cpu.max": "max 100000\n",
        "sys/fs/cgroup/job/memory.max": f"{2**30}\n",
        "sys/fs/cgroup/job/memory.current": f"{2**29}\n",
        "sys/fs/cgroup/job/memory.stat": "inactive_file 0\n",
        "sys/fs/cgroup/job/step/pids.max": "100\n",
    }
    found = _of(tmp_path, files)
    assert found.value("cores") == 0.5
    assert found.value("memory of the control group") == 2**30
    assert found.value("free memory") == 2**29
    assert _about(wrong(found), "512 MiB of memory are free")
    assert _about(wrong(found), "100 processes and threads may run")
    assert _about(wrong(found), f"{SHARED} does not exist")


def test_a_quota_of_the_older_control_groups(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "3:cpu,cpuacct:/docker/a\n",
        "sys/fs/cgroup/cpu/docker/a/cpu.cfs_quota_us": "150000\n",
        "sys/fs/cgroup/cpu/docker/a/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    }
    assert _of(tmp_path, files).value("cores") == min(1.5, CORES)


def test_one_that_hangs_is_killed_with_all_that_it_has_started(tmp_path: Path) -> None:
    def hang() -> Look:
        child = subprocess.Popen(["sleep", "600"])  # noqa: S607
        (tmp_path / "pid").write_text(f"{os.getpid()} {child.pid}")
        sleep(600)
        return Look()

    began = monotonic()
    found = look(Probe(name="Disk", act=hang, limit_s=1, mend="mount"))
    assert monotonic() - began < 60
    assert [(fact.name, fact.text) for fact in found.facts] == [("Disk", "no answer within 1 s")]
    assert found.findings == [Finding(what="Disk: no answer within 1 s", mend="mount")]
    pids = list(map(int, (tmp_path / "pid").read_text().split()))
    until(lambda: all(trouble_of(pid) == DIED for pid in pids), 20)


def test_one_that_raises_says_why_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "abcdefgh12345678")

    def fail() -> Look:
        raise OSError(f"no route to\nhttps://x?key={os.environ['MY_API_KEY']}")

    found = look(Probe(name="Network", act=fail, limit_s=20))
    assert [fact.text for fact in found.facts] == [
        "could not be looked at: OSError: no route to https://x?key=<redacted>"
    ]
    assert found.findings == []


def test_one_that_crashes_is_told_of_and_what_it_prints_is_not_shown(capfd: pytest.CaptureFixture[str]) -> None:
    def crash() -> Look:
        print("noise", flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
        return Look()

    found = look(Probe(name="GPUs", act=crash, limit_s=20))
    assert [fact.text for fact in found.facts] == ["could not be looked at: its process was killed by SIGSEGV"]
    assert capfd.readouterr() == ("", "")


def test_what_is_found_comes_back_as_it_was() -> None:
    given = Look()
    given.tell("long", "x" * 300_000, [1, None, {"a": 2.5}])  # more than a pipe holds
    given.find("what", "mend", wrong=False)
    assert look(Probe(name="p", act=lambda: given, limit_s=20)) == given


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
