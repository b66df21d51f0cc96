"""Tensors that are spread over ranks, and what is whole: torch's ``DTensor``, sharded along dimension 0."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard


def to_local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor; any other one as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """All of a sharded tensor, on every rank (a collective); any other one as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_like(tensor: Tensor, pattern: Tensor) -> Tensor:
    """This rank's part of ``tensor``, sharded as ``pattern`` of the same shape is; any other one as it is.

    Nothing is communicated: every rank has the whole.
    """
    if not isinstance(pattern, DTensor) or tensor.shape != pattern.shape:
        return tensor
    mesh, rows = pattern.device_mesh, tensor
    for dimension, placement in enumerate(pattern.placements):
        if isinstance(placement, Shard):
            parts = rows.chunk(mesh.size(dimension), placement.dim)
            i = mesh.get_local_rank(dimension)
            rows = parts[i] if i < len(parts) else rows.narrow(placement.dim, 0, 0)
    part = rows.to(to_local(pattern).device)
    if part.untyped_storage().nbytes() > part.nbytes:  # a view, that would keep the whole
        part = part.clone()
    return DTensor.from_local(
        part, mesh, pattern.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def mebibytes(size: int) -> str:
    """For people."""
    return f"{size / 2**20:,.1f} MiB"
