"""Sharded and whole tensors: torch's ``DTensor``, sharded along dimension 0.

``torch.distributed.tensor`` takes as long to import as torch itself. Before something has imported it no tensor can be
a ``DTensor``, so these functions look for it among the loaded modules.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

_MODULE = "torch.distributed.tensor"


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a ``DTensor``."""
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(tensor, module.DTensor)


def to_local(tensor: Any) -> Tensor:
    """This rank's part of a sharded tensor; any other one as it is."""
    module = sys.modules.get(_MODULE)  # not by is_sharded: this runs for every gradient
    local: Tensor = tensor.to_local() if module is not None and isinstance(tensor, module.DTensor) else tensor
    return local


def full_tensor(tensor: Any) -> Tensor:
    """All of a sharded tensor, on every rank (a collective); any other one as it is."""
    full: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return full


def shard_like(tensor: Tensor, pattern: Any) -> Tensor:
    """This rank's part of ``tensor``, sharded as ``pattern`` of the same shape is; any other one as it is.

    Nothing is communicated: every rank has the whole.
    """
    return shard_over(tensor, pattern) if is_sharded(pattern) and tensor.shape == pattern.shape else tensor


def shard_over(tensor: Tensor, pattern: Any) -> Tensor:
    """As :func:`shard_like`, of any shape with as many dimensions as the sharded ``pattern``."""
    from torch.distributed.tensor import DTensor, Shard  # noqa: PLC0415  loaded already, see above

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
