"""What a machine has left, by made-up files of a kernel; and who may take some of it."""

from pathlib import Path

import pytest

from distaccum.distributed.memory import available, lacking, machine

GIB = 2**30
V2 = {
    "sys/fs/cgroup/job/memory.max": f"{8 * GIB}\n",
    "sys/fs/cgroup/job/memory.high": "max\n",
    "sys/fs/cgroup/job/memory.current": f"{5 * GIB}\n",
    "sys/fs/cgroup/job/memory.stat": f"anon 1\ninactive_file {GIB}\nactive_file {2 * GIB}\n",
    "sys/fs/cgroup/job/step/memory.max": "max\n",
    "sys/fs/cgroup/job/step/memory.current": f"{3 * GIB}\n",
}
V1 = {
    "sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes": f"{6 * GIB}\n",
    "sys/fs/cgroup/memory/docker/abc/memory.usage_in_bytes": f"{4 * GIB}\n",
    "sys/fs/cgroup/memory/docker/abc/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB}\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{40 * GIB}\n",
    "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 0\n",
}
MEMINFO = f"MemTotal: {64 * 2**20} kB\nMemAvailable:   {20 * 2**20} kB\nHugePages_Total:       0\n"
LEFT: dict[str, tuple[dict[str, str], int | None]] = {
    "another system": ({}, None),
    "an old kernel": ({"proc/meminfo": "MemTotal: 1 kB\nMemFree: 1 kB\n"}, None),
    "a whole machine": ({"proc/meminfo": MEMINFO}, 20 * GIB),
    "no limit": ({"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/\n"}, 20 * GIB),
    "a limit above": ({"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/job/step\n", **V2}, 4 * GIB),
    "throttled before": (
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/job\n",
            **V2,
            "sys/fs/cgroup/job/memory.high": f"{7 * GIB}\n",
        },
        3 * GIB,
    ),
    "version 1": (
        {"proc/meminfo": MEMINFO, "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/docker/abc\n0::/\n", **V1},
        3 * GIB,
    ),
    "over its limit": (
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/job\n",
            **V2,
            "sys/fs/cgroup/job/memory.max": f"{2 * GIB}\n",
        },
        0,
    ),
    "its own namespace": (
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": f"{GIB}\n",
            "sys/fs/cgroup/memory.current": "0\n",
            "sys/fs/cgroup/memory.stat": "inactive_file 0\n",
        },
        GIB,
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left(tmp_path: Path, name: str) -> None:
    files, expected = LEFT[name]
    for file, content in files.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(content)
    assert available(tmp_path) == expected


def test_this_machine_has_some(tmp_path: Path) -> None:
    left = available()
    if left is None:
        pytest.skip("no /proc/meminfo")
    total = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    assert 0 < left <= 2**10 * int(total.split()[1])
    assert machine() != machine(tmp_path)


def test_ranks_of_one_machine_take_theirs_together() -> None:
    assert lacking([("a", 4 * GIB, 10 * GIB), ("b", 4 * GIB, 10 * GIB)]) == ""
    assert lacking([("a", 4 * GIB, 10 * GIB), ("a", GIB, 10 * GIB)]) == ""
    problem = lacking([("b", 0, 10 * GIB), ("a", 4 * GIB, 10 * GIB), ("a", 2 * GIB, 11 * GIB)])
    assert problem == "2 ranks from 1 on would take 6.0 GiB, more than half of the 10.0 GiB that are left there"
    assert lacking([("a", 300 * 2**20, 512 * 2**20)]).startswith("rank 0 would take 300.0 MiB, more than half")
    assert lacking([("a", 0, 0), ("b", 0, None)]) == ""
    assert lacking([("a", 1, GIB), ("b", 1, None)]) == "nobody says how much memory is left where rank 1 is"
