"""Brings all ranks' records to rank 0. Every function is a collective."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distaccum.distributed.world import World
from distaccum.engines.modules import full_tensor
from distaccum.tools.audit.records import RankRecord, Window, WindowRecord


def open_world_or_none() -> World | None:
    """The program's process group, seen with a group for the host; None where it has opened none.

    Not by the launcher's variables, which a framework may have taken back by now.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    group = None if "cpu" in dist.get_backend_config() else dist.new_group(backend="gloo")
    return World(rank=dist.get_rank(), size=dist.get_world_size(), device=torch.device("cpu"), host_group=group)


def all_gather(world: World | None, value: Any) -> list[Any]:
    """Every rank's ``value``."""
    return [value] if world is None else world.all_gather_object(value)


def gather_window(world: World | None, window: Window) -> WindowRecord | None:
    """The window of all ranks, on rank 0; None on the others."""
    gradients = {name: None if g is None else full_tensor(g).cpu() for name, g in sorted(window.gradients.items())}
    weights = {name: full_tensor(w).cpu() for name, w in sorted(window.weights.items())}
    digests = all_gather(world, digest(gradients))
    rank = 0 if world is None else world.rank
    same_as = digests.index(digests[rank])
    record = RankRecord(
        batches=[micro.batch for micro in window.micro_batches],
        sources=[micro.source for micro in window.micro_batches],
        reduces=[micro.reduces for micro in window.micro_batches],
        clips=window.clips,
        gradients=gradients if same_as == rank else None,
        same_as=same_as,
        weights_digest=digest(weights),
        loss_scale=window.loss_scale,
        low_precision=window.low_precision,
    )
    if world is None:
        return WindowRecord(window.index, [record], weights)
    gathered: list[Any] | None = [None] * world.size if world.is_main else None
    dist.gather_object(record, gathered, dst=0, group=world.host_group)
    return None if gathered is None else WindowRecord(window.index, gathered, weights)


def digest(tensors: Mapping[str, Tensor | None]) -> str:
    """A hash of names and bytes."""
    found = hashlib.blake2b(digest_size=16)
    for name, tensor in tensors.items():
        found.update(name.encode())
        if tensor is not None and tensor.numel():
            found.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def common_indices(every: Sequence[Sequence[int]]) -> list[int]:
    """The windows that all ranks have recorded, in order."""
    return sorted(set(every[0]).intersection(*every[1:]))
