"""Ranks, devices and the few small collectives. A :class:`World` is passed in, never global."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from time import sleep
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]  # public, though not marked as exported
from torch.distributed.rendezvous import rendezvous

from distaccum.errors import ConfigError
from distaccum.meeting import own_part

_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_GROUP_TIMEOUT = timedelta(minutes=30)
# Gloo's threads let go of the last collective's tensors a little after it returns. If the interpreter is ending by
# then, the process aborts: "terminate called without an active exception" (seen with torch 2.13; pytorch#190489).
_SETTLE_S = 0.2


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Who this process is, as the launcher said it; known before any process group exists."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    launched: bool = False  # by torchrun or the like; otherwise this process is a world of one
    planned: bool = False  # nobody has started them yet: one process checks what they are to do

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Ranks:
        """Reads torchrun's variables; without any of them this process is a world of one.

        Raises:
            ConfigError: if only some of them are set, or one is not a number.
        """
        present = [name for name in _LAUNCHER_VARIABLES if name in environment]
        if "RANK" not in present and "WORLD_SIZE" not in present:
            return cls()
        missing = [name for name in _LAUNCHER_VARIABLES if name not in present]
        if missing:
            remedy = "Start with torchrun, which sets them all, or unset RANK and WORLD_SIZE for one process"
            raise ConfigError(missing[0], None, f"not set, while {', '.join(present)} are", remedy)
        numbers = {}
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            if not environment[name].isdecimal():
                raise ConfigError(name, environment[name], "not a number", "Start with torchrun, which sets it")
            numbers[name] = int(environment[name])
        return cls(rank=numbers["RANK"], size=numbers["WORLD_SIZE"], local_rank=numbers["LOCAL_RANK"], launched=True)

    def device(self) -> torch.device:
        """This rank's GPU where the machine has any, else the CPU.

        Raises:
            ConfigError: if there are more processes on this machine than GPUs.
        """
        if not torch.cuda.is_available():
            return torch.device("cpu")
        gpus = torch.cuda.device_count()
        if self.local_rank >= gpus:
            remedy = f"Start at most {gpus} processes on this machine, or hide the GPUs with CUDA_VISIBLE_DEVICES=''"
            raise ConfigError("LOCAL_RANK", self.local_rank, f"this machine has {gpus} GPUs", remedy)
        return torch.device("cuda", self.local_rank)

    def store(self) -> Store:
        """These ranks' own part of the launcher's key-value store; one in memory for a world of one."""
        if not self.launched:
            return HashStore()
        store: Store
        store, _, _ = next(rendezvous("env://", rank=self.rank, world_size=self.size))
        return own_part(store, self.rank, self.size, timeout_s=_GROUP_TIMEOUT.total_seconds())


@dataclass(frozen=True, kw_only=True)
class World:
    """An open process group, seen from one rank.

    Host tensors travel by gloo and device tensors by the device's own backend, in the same group, so that a count that
    the host already knows never waits for the device.
    """

    rank: int
    size: int
    device: torch.device
    host_group: dist.ProcessGroup | None = None  # None: the default group serves the host as well

    @classmethod
    def join(cls) -> World:
        """The process group that is open already; without one, a group of the ranks that the launcher started.

        A group that is opened here lasts until the process exits.

        Raises:
            ConfigError: as :meth:`Ranks.from_environment` and :meth:`Ranks.device`.
        """
        ranks = Ranks.from_environment()
        if dist.is_initialized() and not ranks.launched and torch.cuda.is_available():
            device = torch.device("cuda", torch.cuda.current_device())  # whoever opened the group has chosen it
        else:
            device = ranks.device()
        if not dist.is_initialized():
            opened = ExitStack()
            world = opened.enter_context(open_world(ranks, ranks.store(), device))
            atexit.register(opened.close)
            return world
        serves_host = "cpu" in dist.get_backend_config()  # else NCCL alone, which cannot sum what the host counted
        group = None if serves_host else dist.new_group(backend="gloo")
        return cls(rank=dist.get_rank(), size=dist.get_world_size(), device=device, host_group=group)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one that writes and prints."""
        return self.rank == 0

    def sum_numbers(self, numbers: Sequence[float]) -> list[float]:
        """Sums numbers over the ranks, on the host: one small all-reduce, no device involved. Exact up to 2**53."""
        # A column, by which the counters tell it from a gradient bucket.
        tensor = torch.tensor(numbers, dtype=torch.float64).unsqueeze(1)
        dist.all_reduce(tensor, group=self.host_group)
        return cast(list[float], tensor.squeeze(1).tolist())

    def max_counts(self, counts: Sequence[int]) -> list[int]:
        """The greatest of each integer over the ranks, on the host."""
        tensor = torch.tensor(counts, dtype=torch.int64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.host_group)
        return cast(list[int], tensor.tolist())

    def union(self, names: Sequence[str]) -> tuple[str, ...]:
        """The names that any rank gives, sorted; the same on every rank."""
        return tuple(sorted({name for given in self.everyone(list(names)) for name in given}))

    def everyone(self, value: Any) -> list[Any]:
        """Each rank's ``value``, a plain one, by rank; the same on every rank."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.host_group)
        return values

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums a tensor of any shape over the ranks, in place, where it lies."""
        dist.all_reduce(tensor)
        return tensor

    def from_main_(self, tensor: torch.Tensor) -> None:
        """Overwrites a tensor of any shape, where it lies, by rank 0's."""
        dist.broadcast(tensor, src=0)

    def text_from_main(self, text: str) -> str:
        """Rank 0's ``text`` on every rank."""
        box: list[str] = [text]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"), group=self.host_group)
        return box[0]

    def barrier(self) -> None:
        """Waits, on the host, until every rank has come here."""
        self.max_counts([0])


@contextmanager
def open_world(ranks: Ranks, store: Store, device: torch.device) -> Iterator[World]:
    """Opens the default process group for the block's length; closed on any exit from it.

    Args:
        ranks: who this process is.
        store: reached by every rank; see :meth:`Ranks.store`.
        device: where this rank's model lives; decides the backend (NCCL for CUDA, gloo for the CPU).
    """
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)  # or NCCL and the random generators would take the first GPU on every rank
    dist.init_process_group(backend, store=store, rank=ranks.rank, world_size=ranks.size, timeout=_GROUP_TIMEOUT)
    try:
        yield World(rank=ranks.rank, size=ranks.size, device=device)
    finally:
        if dist.is_initialized():  # or the user has closed it already
            sleep(_SETTLE_S)
            dist.destroy_process_group()
