"""What a process holds in tensors, and for what: found by walking real tensors, not by asking an engine."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from distaccum.engines.dtensor import to_local

Places = dict[int, int]
"""Memory of tensors: by its address, the bytes."""


def alive() -> Places:
    """All memory of tensors that Python can reach, each once, however many tensors lie in it."""
    # type(): isinstance would ask objects that only pretend to have a class, and some of them answer by importing it
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
    return places(tensors) | places(gradients(tensors))


def places(tensors: Iterable[Tensor]) -> Places:
    """The memory of these; that of this rank, where they are sharded."""
    found = {}
    for tensor in map(to_local, tensors):
        if tensor.layout is torch.strided and not tensor.is_meta:
            storage = tensor.untyped_storage()
            with suppress(RuntimeError):  # a fake one, left over from compiling: it has no memory
                if storage.nbytes():
                    found[storage.data_ptr()] = storage.nbytes()
    return found


def gradients(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Those of them: they need not have been seen by Python before."""
    for tensor in tensors:
        if tensor.is_leaf and tensor.grad is not None:
            yield tensor.grad


def own_memory(parameter: Tensor) -> Iterator[Tensor]:
    """Where a parameter of the model lies: DeepSpeed's stage 3 keeps its shard beside it."""
    yield parameter
    shard = getattr(parameter, "ds_tensor", None)
    if shard is not None:
        yield shard


@dataclass(frozen=True, kw_only=True)
class Held:
    """Bytes on one rank at one moment. ``copies``: what the optimizer steps that is not the model's own memory (fp32
    weights beside those of the forward); ``other``: all that is none of these."""

    parameters: int
    copies: int
    gradients: int
    optimizer: int
    other: int

    @classmethod
    def of(cls, model: nn.Module, optimizer: Optimizer, baseline: Mapping[int, int]) -> Held:
        """Now; without what was there in ``baseline``."""
        parameters = list(model.parameters())
        stepped: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        stepped += [key for key in optimizer.state if isinstance(key, Tensor)]  # DeepSpeed's stage 3 empties the groups
        states = (value for state in optimizer.state.values() for value in state.values())
        roles = (
            places(memory for parameter in parameters for memory in own_memory(parameter)),
            places(stepped),
            places(gradients([*parameters, *stepped])),
            places(value for value in states if isinstance(value, Tensor)),
            alive(),
        )
        taken, sums = set(baseline), []
        for role in roles:
            sums.append(sum(size for place, size in role.items() if place not in taken))
            taken |= set(role)
        return cls(**dict(zip(cls.__annotations__, sums, strict=True)))

    @property
    def total(self) -> int:
        """All of it."""
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
    """Bytes that are allocated on ``device``, Python's own small objects left out; 0 where nobody knows.

    On the CPU those are the C library's (glibc 2.33 or later), of which tensors are not all: what an import reads in is
    there too.
    """
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    ask = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if ask is None:
        return 0
    ask.restype = _MallocInfo
    found = ask()
    return int(found.uordblks + found.hblkhd)
