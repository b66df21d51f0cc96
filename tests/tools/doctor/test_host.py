"""Each finding of the machine made true: limits in a child, a small /dev/shm, made-up control groups."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest
import torch

from distaccum.tools.doctor.facts import Look
from distaccum.tools.doctor.host import host
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
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    found = looked(lambda: host(local_ranks=1, cpu_trains=True, root=tmp_path))
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
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    found = looked(lambda: host(local_ranks=1, cpu_trains=True, root=tmp_path))
    assert found.value("cores") == min(1.5, CORES)
