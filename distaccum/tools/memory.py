"""What a micro-step and an optimizer's first step take of memory, and how much a rank may take."""

from __future__ import annotations

import resource
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from distaccum.distributed.memory import available
from distaccum.engines.modules import to_local
from distaccum.engines.rules import trial_copy

# The memory of the tensors that operators make, counted while they are alive.

BLOCK = {"cuda": 512}  # bytes, of which a GPU's allocator gives whole ones


class LiveMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not annotate it
    """Counts the bytes of tensors on one kind of device that operators make within the block, while they are alive.

    Args:
        kind: of the device.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._kind, self._block = kind, BLOCK.get(kind, 1)
        self._known: dict[int, weakref.ref[Any]] = {}  # by a storage's address

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operator, then looks at what it gives; what it is given and nobody made was there before."""
        self._note((args, kwargs), made=False)
        found = function(*args, **(kwargs or {}))
        self._note(found, made=True)
        return found

    def _note(self, values: Any, *, made: bool) -> None:
        for tensor in tree_leaves(values):
            if isinstance(tensor, Tensor) and tensor.device.type == self._kind:
                storage = tensor.untyped_storage()
                if storage._cdata not in self._known:
                    self._add(storage, -(-storage.nbytes() // self._block) * self._block if made else 0)

    def _add(self, storage: torch.UntypedStorage, size: int) -> None:
        address = storage._cdata

        def freed(_: object) -> None:
            del self._known[address]
            self.now -= size

        self._known[address] = weakref.ref(storage, freed)
        self.now += size
        self.peak = max(self.peak, self.now)


# How much memory a rank may take of its device.


def memory_left(device: torch.device, *, sharing: int = 1) -> int | None:
    """Bytes that this rank can still take, beside what it holds; None where nobody says.

    On a GPU what is free there, and what torch has cached of it, within the fraction of the card that this process may
    take. On the host what the machine and its control groups leave, by the ranks that share it, within the limits of
    the process's address space and data.

    Args:
        device: of this rank.
        sharing: ranks on this machine.
    """
    if device.type != "cpu":
        own = torch.get_device_module(device)
        free, total = own.mem_get_info(device)
        cached = own.memory_reserved(device) - own.memory_allocated(device)
        fraction = getattr(own, "get_per_process_memory_fraction", lambda _: 1.0)(device)
        allowed = int(fraction * total) - own.memory_allocated(device)
        return max(0, int(min(free + cached, allowed)))
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


# The memory that optimizers' first step takes and keeps: known before there is one.
#
# Their rule steps a few small parameters; what it keeps and takes for an element of those, it does for each.

_SIDE = 64  # of a trial's parameters
_PARAMETERS = 2


def state_to_come(optimizers: Sequence[Optimizer]) -> int:
    """Bytes of state on this rank that the optimizers do not hold yet, and will after their first step.

    Of an optimizer whose rule cannot be tried, as much as Adam's.
    """
    total = 0.0
    for optimizer in optimizers:
        per_element: dict[torch.dtype, float] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if not parameter.requires_grad or parameter in optimizer.state:
                    continue
                kind = parameter.dtype
                if kind not in per_element:
                    per_element[kind] = _bytes_per_element(optimizer, kind)
                total += per_element[kind] * to_local(parameter).numel()
    return round(total)


def _bytes_per_element(optimizer: Optimizer, dtype: torch.dtype) -> float:
    values = [nn.Parameter(torch.zeros(_SIDE, _SIDE, dtype=dtype)) for _ in range(_PARAMETERS)]
    settings = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    trial = trial_copy(optimizer, [{**settings, "params": values, "fused": None, "foreach": False}])
    elements = _PARAMETERS * _SIDE**2
    try:
        assert trial is not None
        for value in values:
            value.grad = torch.zeros_like(value)
        before = LiveMemory("cpu")
        with before, torch.random.fork_rng(devices=[]):
            trial.step()
        kept = before.now
    except Exception:  # each optimizer has its own
        return 2.0 * dtype.itemsize
    return kept / elements
