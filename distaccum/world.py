"""Ranks, devices and the few small collectives. A :class:`World` is passed in, never global."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]  # public, though not marked as exported
from torch.distributed.rendezvous import rendezvous

from distaccum.errors import ConfigError

_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_GROUP_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Who this process is, as the launcher said it; known before any process group exists."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    launched: bool = False  # by torchrun or the like; otherwise this process is a world of one

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
        """The key-value store that the launcher gave these ranks; one in memory for a world of one."""
        if not self.launched:
            return HashStore()
        store: Store
        store, _, _ = next(rendezvous("env://", rank=self.rank, world_size=self.size))
        return store


@dataclass(frozen=True, kw_only=True)
class World:
    """An open process group, seen from one rank.

    Host tensors travel by gloo and device tensors by the device's own backend, in the same group, so that a count that
    the host already knows never waits for the device.
    """

    rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one that writes and prints."""
        return self.rank == 0

    def sum_counts(self, counts: Sequence[int]) -> list[int]:
        """Sums integers over the ranks, on the host: one small all-reduce, no device involved."""
        tensor = torch.tensor(counts, dtype=torch.int64)
        dist.all_reduce(tensor)
        return [int(count) for count in tensor.tolist()]

    def max_counts(self, counts: Sequence[int]) -> list[int]:
        """The greatest of each integer over the ranks, on the host."""
        tensor = torch.tensor(counts, dtype=torch.int64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return [int(count) for count in tensor.tolist()]

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
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def barrier(self) -> None:
        """Waits, on the host, until every rank has come here."""
        self.sum_counts([0])


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
        dist.destroy_process_group()
