"""What the kernel and the container give this process: cores, memory, shared memory, limits."""

from __future__ import annotations

import os
import platform
import resource
from contextlib import suppress
from pathlib import Path

from distaccum.config.checks import size_of
from distaccum.data.loading_processes import MORE_SHARED_MEMORY
from distaccum.distributed.memory import available, control_groups
from distaccum.tools.doctor.facts import Look

_SHARED_MEMORY = "dev/shm"  # below a root
# A container's default of 64 MiB is what this is about: Docker's and containerd's. Loading processes hold windows
# there, and NCCL some ten MiB for each pair of ranks.
_SHARED_WANTED, _SHARED_FREE_WANTED = 2**30, 2**28
# Each tensor on its way from a loading process is an open file, each other rank some connections. Of 1024, systemd's
# default for what may be opened without asking, loaders run out with many workers ("Too many open files").
_FILES_WANTED, _FILES_NEEDED, _FILES_PLENTY = 4096, 1024, 65536
# A rank has some hundred threads: torch's, one for each connection and each loading process's own.
_PROCESSES_WANTED = 2048
_MEMORY_WANTED = 2**30  # an interpreter with torch and a GPU's driver takes about that much
_TWICE = 2  # as many threads as cores: from here on they only take turns


def host(*, local_ranks: int, cpu_trains: bool, root: Path = Path("/")) -> Look:
    """What ``local_ranks`` ranks of this machine share.

    Args:
        local_ranks: how many.
        cpu_trains: whether they compute on the CPU; where a GPU does, one thread is enough.
        root: below which the kernel's files are read.
    """
    found = Look()
    found.tell("kernel", f"{platform.system()} {platform.release()}")
    _cores(found, local_ranks, root, cpu_trains=cpu_trains)
    _memory(found, root)
    _shared_memory(found, root)
    _limits(found, root)
    return found


def _cores(found: Look, local_ranks: int, root: Path, *, cpu_trains: bool) -> None:
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = min(_quotas(root), default=None)
    cores = allowed if quota is None else min(allowed, quota)
    limit = "" if quota is None else f", its control group has the time of {quota:g}"
    found.tell("cores", f"{allowed} of {os.cpu_count()} may be used{limit}", cores)
    share = max(1, int(cores / local_ranks))
    threads, told = _threads(), os.environ.get("OMP_NUM_THREADS")
    by = f"OMP_NUM_THREADS={told}" if told else "OMP_NUM_THREADS is not set"
    ranks = f" for {local_ranks} ranks" if local_ranks > 1 else ""
    found.tell("threads of a rank", f"{threads} ({by}; {cores:g} cores{ranks})", threads)
    mend = f"export OMP_NUM_THREADS={share}"
    if threads * local_ranks >= _TWICE * max(cores, local_ranks):
        what = f"{local_ranks} x {threads} threads take turns on {cores:g} cores: {by}"
        found.find(what, mend)
    elif cpu_trains and _TWICE * threads <= share:
        what = f"a rank computes with {threads} threads where it has {share} cores: {by}"
        found.find(f"{what} (torchrun sets 1 where it is not set)", mend, wrong=False)


def _threads() -> int:
    import torch  # noqa: PLC0415  it may be what is wrong

    return torch.get_num_threads()


def _memory(found: Look, root: Path) -> None:
    left = available(root)
    limit = min(_numbers("memory", "memory.max", "memory.limit_in_bytes", root), default=None)
    total = None
    with suppress(OSError, ValueError, LookupError):
        rows = (line.partition(":") for line in (root / "proc/meminfo").read_text().splitlines())
        total = 2**10 * int(next(value for name, _, value in rows if name == "MemTotal").split()[0])
    found.tell("memory", "not told" if total is None else size_of(total), total)
    if limit is not None and (total is None or limit < total):
        found.tell("memory of the control group", f"at most {size_of(limit)}", limit)
    if left is None:
        return
    found.tell("free memory", size_of(left), left)
    if left < _MEMORY_WANTED:
        what = f"{size_of(left)} of memory are free, less than one process with torch takes"
        found.find(
            what, "ps -e -o rss,pid,user,args --sort=-rss | head    # who has it; end it, or ask for more: --mem=64G"
        )


def _shared_memory(found: Look, root: Path) -> None:
    path = root / _SHARED_MEMORY
    shown = Path("/") / _SHARED_MEMORY
    try:
        seen = os.statvfs(path)
    except OSError:
        found.tell(str(shown), "does not exist", "")
        found.find(f"{shown} does not exist, through which batches travel", MORE_SHARED_MEMORY)
        return
    total, free = seen.f_blocks * seen.f_frsize, seen.f_bavail * seen.f_frsize
    found.tell(str(shown), f"{size_of(free)} free of {size_of(total)}", {"bytes": total, "free": free})
    if total < _SHARED_WANTED:
        what = f"{shown} has {size_of(total)}: loading processes, whose batches travel through it, die there of SIGBUS"
        found.find(what, MORE_SHARED_MEMORY)
    elif free < _SHARED_FREE_WANTED:
        what = f"{shown} has {size_of(free)} left of {size_of(total)}: dead processes may have left it full"
        found.find(what, f"ls -lS {shown} | head    # then remove what belongs to no process that runs: fuser FILE")


def _limits(found: Look, root: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found.tell("open files (ulimit -n)", f"{_limit(soft)}, up to {_limit(hard)}", _none(soft))
    if _is_less(soft, _FILES_WANTED):
        more = _FILES_PLENTY if hard == resource.RLIM_INFINITY else min(hard, _FILES_PLENTY)
        mend = f"ulimit -n {more}"
        if _is_less(hard, _FILES_WANTED):
            mend = f"docker run --ulimit nofile={_FILES_PLENTY}    # or nofile in /etc/security/limits.conf"
        what = f"a process may open {soft} files; each batch on its way from a loading process takes some"
        found.find(what, mend, wrong=_is_less(soft, _FILES_NEEDED))
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    found.tell("locked memory (ulimit -l)", _limit(soft, memory=True), _none(soft))
    adapters = sorted(path.name for path in (root / "sys/class/infiniband").glob("*"))
    if adapters and soft != resource.RLIM_INFINITY:  # registered memory is locked; NCCL's own troubleshooting says so
        what = (
            f"a process may lock {size_of(soft)}, and {adapters[0]} (InfiniBand, RoCE) needs all that it sends locked"
        )
        found.find(what, "ulimit -l unlimited    # in a container: docker run --ulimit memlock=-1")
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    groups = min(_numbers("pids", "pids.max", "pids.max", root), default=None)
    most = [one for one in (_none(soft), groups) if one is not None]
    found.tell("threads (ulimit -u)", str(min(most)) if most else "unlimited", min(most, default=None))
    if most and min(most) < _PROCESSES_WANTED:
        mend = "docker run --pids-limit=-1 (Kubernetes: podPidsLimit)" if groups == min(most) else "ulimit -u unlimited"
        found.find(f"{min(most)} processes and threads may run; ranks with loading processes have hundreds each", mend)


def _limit(value: int, *, memory: bool = False) -> str:
    if value == resource.RLIM_INFINITY:
        return "unlimited"
    return size_of(value) if memory else str(value)


def _none(value: int) -> int | None:
    return None if value == resource.RLIM_INFINITY else value


def _is_less(value: int, wanted: int) -> bool:
    return value != resource.RLIM_INFINITY and value < wanted


def _quotas(root: Path) -> list[float]:
    """Cores' worth of time that each control group leaves this process."""
    quotas = []
    for group, unified in control_groups("cpu", root):
        with suppress(OSError, ValueError, ZeroDivisionError):  # no quota: "max", or no such file
            if unified:
                allowed, _, period = (group / "cpu.max").read_text().partition(" ")
            else:
                allowed, period = ((group / f"cpu.cfs_{what}_us").read_text() for what in ("quota", "period"))
            if int(allowed) > 0:
                quotas.append(int(allowed) / int(period))
    return quotas


def _numbers(controller: str, file: str, older: str, root: Path) -> list[int]:
    """What ``file`` of each control group says, or ``older`` of version 1, where it says a number."""
    found = []
    for group, unified in control_groups(controller, root):
        with suppress(OSError, ValueError):  # no limit: "max", or no such file
            found.append(int((group / (file if unified else older)).read_text()))
    return found
