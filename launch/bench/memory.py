"""Memory that a process holds in tensors, by role; found by walking the tensors, not by asking an engine."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from distaccum.engines.modules import to_local

Storages = dict[int, int]
"""Bytes of the memory that tensors lie in, by its address."""


def live_storages() -> Storages:
    """All memory of tensors that Python can reach, each once, however many tensors lie in it."""
    # type(): isinstance would ask objects that only pretend to have a class, and some of them answer by importing it
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
    return storages(tensors) | storages(gradients(tensors))


def storages(tensors: Iterable[Tensor]) -> Storages:
    """The memory of these tensors; of sharded ones this rank's shards."""
    found = {}
    for tensor in map(to_local, tensors):
        is_fake = issubclass(type(tensor), FakeTensor)  # left over from compiling: it has no memory
        if tensor.layout is torch.strided and not tensor.is_meta and not is_fake and not is_lazy(tensor):
            storage = tensor.untyped_storage()
            with suppress(RuntimeError):  # a subclass without memory of its own
                if storage.nbytes():
                    found[storage.data_ptr()] = storage.nbytes()
    return found


def gradients(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """The gradients of these tensors, which Python need not have seen before."""
    for tensor in tensors:
        if tensor.is_leaf and tensor.grad is not None:
            yield tensor.grad


def own_memory(parameter: Tensor) -> Iterator[Tensor]:
    """The tensors that a parameter of the model lies in: with DeepSpeed's stage 3 its shard is an attribute."""
    yield parameter
    shard = getattr(parameter, "ds_tensor", None)
    if shard is not None:
        yield shard


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Bytes on one rank at one moment.

    ``copies``: weights that the optimizer steps outside the model's own memory (fp32 weights of a 16-bit forward);
    ``other``: tensors in none of the other roles.
    """

    parameters: int
    copies: int
    gradients: int
    optimizer: int
    other: int

    @classmethod
    def of(cls, model: nn.Module, optimizer: Optimizer, baseline: Mapping[int, int]) -> MemoryUse:
        """Measures now; memory in ``baseline``, which was there before, is left out."""
        parameters = list(model.parameters())
        stepped: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        stepped += [key for key in optimizer.state if isinstance(key, Tensor)]  # DeepSpeed's stage 3 empties the groups
        states = (value for state in optimizer.state.values() for value in state.values())
        roles = (
            storages(memory for parameter in parameters for memory in own_memory(parameter)),
            storages(stepped),
            storages(gradients([*parameters, *stepped])),
            storages(value for value in states if isinstance(value, Tensor)),
            live_storages(),
        )
        taken, sums = set(baseline), []
        for role in roles:
            sums.append(sum(size for address, size in role.items() if address not in taken))
            taken |= set(role)
        return cls(**dict(zip(cls.__annotations__, sums, strict=True)))

    @property
    def total(self) -> int:
        """The sum of all roles."""
        return self.parameters + self.copies + self.gradients + self.optimizer + self.other


class _MallocInfo(ctypes.Structure):
    """The ``struct mallinfo2`` of glibc."""

    _fields_: ClassVar = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def allocated(device: torch.device) -> int:
    """Bytes that are allocated on ``device`` without Python's own small objects; 0 where nobody knows.

    On the CPU the C library (glibc 2.33 or later) counts them: not only tensors, but also what an import reads in.
    """
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    ask = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if ask is None:
        return 0
    ask.restype = _MallocInfo
    found = ask()
    return int(found.uordblks + found.hblkhd)
