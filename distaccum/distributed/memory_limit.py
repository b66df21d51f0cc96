"""How much memory a rank may take of its device."""

from __future__ import annotations

import resource
from contextlib import suppress
from pathlib import Path

import torch

from distaccum.distributed.free_memory import available


def memory_left(device: torch.device, *, sharing: int = 1) -> int | None:
    """Bytes that this rank can still take, beside what it holds; None where nobody says.

    On a GPU what is free there, and what torch has cached of it, within the fraction of the card that this process may
    take. On the host what the machine and its control groups leave, by the ranks that share it, within the limits of
    the process's address space and data.

    Args:
        device: of this rank.
        sharing: ranks on this machine.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        fraction = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)(device)
        allowed = int(fraction * total) - torch.cuda.memory_allocated(device)
        return max(0, min(free + cached, allowed))
    left = available()
    limits = [] if left is None else [left // sharing]
    return max(0, min(limits + _limits_of_process())) if limits or _limits_of_process() else None


def _limits_of_process() -> list[int]:
    found = []
    for limit, row in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        most, _ = resource.getrlimit(limit)
        if most != resource.RLIM_INFINITY:
            with suppress(OSError, LookupError, ValueError):
                lines = (line.partition(":") for line in Path("/proc/self/status").read_text().splitlines())
                used = {name: value.split()[0] for name, _, value in lines if value.split()}
                found.append(most - 1024 * int(used[row]))
    return found
