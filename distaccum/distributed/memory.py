"""Memory that is over, in words: what was done, and what needs less."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from distaccum.distributed.activity import Phase
from distaccum.distributed.world import World
from distaccum.errors import DistaccumError, ResourceError

# The control groups of Linux that limit this process: of version 2, and of version 1.
#
# https://docs.kernel.org/admin-guide/cgroup-v2.html and .../cgroup-v1/.


def control_groups(controller: str, root: Path = Path("/")) -> Iterator[tuple[Path, bool]]:
    """The folders of each group that this process is in, and of all above it; whether they are of version 2.

    As far as they are seen: a container may see its own alone, as the topmost. None where there are no such groups.

    Args:
        controller: of version 1: ``cpu``, ``memory``, ``pids``. A folder of version 2 has the files of all of them.
        root: below which the kernel's files are read.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, name = line.split(":", 2)
        unified = number == "0"
        if unified or controller in controllers.split(","):
            top = root / "sys/fs/cgroup" / ("" if unified else controller)
            folder = top / name.lstrip("/")
            for group in (folder, *folder.parents):
                yield group, unified
                if group == top:
                    break


# Memory that a machine has left: by its kernel's word, and by the limits of this process's control groups.
#
# Linux alone says so. A control group's is its limit less what it uses, without the pages of files that were not used
# lately: https://kubernetes.io/docs/concepts/scheduling-eviction/node-pressure-eviction counts a working set so.

_SHARE = 0.5  # of what is left, that may be taken at once


def lacks(world: World, size: int) -> str:
    """Why not every rank can take its ``size`` bytes and leave half of what its machine has; "" if all can.

    A collective. Ranks of one machine, in containers too, take what they take together.
    """
    return lacking(world.all_gather_object((machine(), size, available())))


def lacking(wanted: Sequence[tuple[str, int, int | None]]) -> str:
    """:func:`lacks`, given each rank's machine, its bytes, and those that are left as it sees them."""
    for place in dict.fromkeys(machine for machine, _, _ in wanted):
        ranks = [rank for rank, (machine, _, _) in enumerate(wanted) if machine == place]
        needed = sum(wanted[rank][1] for rank in ranks)
        left = [wanted[rank][2] for rank in ranks]
        known = [one for one in left if one is not None]
        if needed and len(known) < len(left):
            return f"nobody says how much memory is left where rank {ranks[left.index(None)]} is"
        if needed > _SHARE * min(known, default=0):
            who = f"{len(ranks)} ranks from {ranks[0]} on" if len(ranks) > 1 else f"rank {ranks[0]}"
            return f"{who} would take {_shown(needed)}, more than half of the {_shown(min(known))} that are left there"
    return ""


def machine(root: Path = Path("/")) -> str:
    """A name that all processes have which share their memory with this one; files are read below ``root``."""
    with suppress(OSError):
        return (root / "proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def available(root: Path = Path("/")) -> int | None:
    """Bytes that may be taken before the machine, or a control group, has none left; None where nobody says.

    Files are read below ``root``.
    """
    with suppress(OSError, ValueError, LookupError):
        rows = (line.partition(":") for line in (root / "proc/meminfo").read_text().splitlines())
        kibibytes = {name: value.split()[0] for name, _, value in rows}
        return max(0, min([2**10 * int(kibibytes["MemAvailable"]), *_left(root)]))
    return None


def _left(root: Path) -> Iterator[int]:
    """What each control group of this process leaves it."""
    for group, unified in control_groups("memory", root):
        limits = ("memory.max", "memory.high") if unified else ("memory.limit_in_bytes",)
        used = "memory.current" if unified else "memory.usage_in_bytes"
        reclaimed = "inactive_file" if unified else "total_inactive_file"
        for limit in limits:
            with suppress(OSError, ValueError):  # no limit: "max", or no such file
                most = int((group / limit).read_text())
                statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                yield most - int((group / used).read_text()) + int(statistics.get(reclaimed, 0))


def _shown(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


# What allocators and libraries without an error class of their own say: the host's, oneDNN's, cuBLAS's, CUDA's, NCCL's.
_SAID = (
    "can't allocate memory",
    "std::bad_alloc",
    "could not create a memory object",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDA error: out of memory",
    "Cuda failure 2 'out of memory'",
    "Failed to CUDA calloc",
)
_OF_A_MICRO_BATCH = (Phase.FORWARD, Phase.BACKWARD, Phase.REDUCTION)


def is_out_of_memory(error: BaseException) -> bool:
    """Of the host, or of a device; not in words yet."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if not isinstance(error, RuntimeError) or isinstance(error, DistaccumError):
        return False
    said = str(error)
    return any(words in said for words in _SAID)


def out_of_memory(error: BaseException, world: World) -> ResourceError:
    """What was done, and what needs less memory."""
    of_device = isinstance(error, torch.OutOfMemoryError) or "cuda" in str(error).lower()
    device, place = world.device.type != "cpu" and of_device, world.activity.now()
    micro = f", micro-batch {place.done + 1} of this rank" if place.phase in _OF_A_MICRO_BATCH else ""
    said = (str(error).splitlines() or [type(error).__name__])[0]
    host = "" if device else ", or lower trainer.num_workers: this is the host's memory"
    return ResourceError(
        f"out of memory in {place}{micro}: {said}. Lower batch.micro_size (the global batch and its gradient "
        f"stay the same), use activation checkpointing, or an engine that shards the model (fsdp2, deepspeed){host}"
    )
