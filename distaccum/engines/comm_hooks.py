"""Gradient reductions in another number format than that of the gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def average_in_dtype(dtype: torch.dtype, ranks: int) -> Callable[[object, Any], Any]:
    """A communication hook for DDP: averages each bucket over ``ranks``, sent in ``dtype``.

    Torch's own ``fp16_compress_hook`` casts before it divides: of 80000 and 20000 it makes infinity, though fp16 holds
    their average.
    """

    def average(whole: torch.Tensor) -> Any:
        sent = whole.div_(ranks).to(dtype)
        reduced = dist.all_reduce(sent, async_op=True).get_future()
        return reduced.then(lambda done: whole.copy_(done.value()[0]))

    return lambda _, bucket: average(bucket.buffer())  # DDP accepts its own annotations, as types, or none


# torch 2.13 gave it a new name, and warns of the old one.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class ReduceScatterInDtype:
    """A reduce-scatter for FSDP2: sends in ``dtype`` what is accumulated in a wider format; divides before it casts.

    Args:
        dtype: None: the input's own.
        zero_contribution: while it is not empty, this rank adds zeros, whatever its input is.
    """

    def __init__(self, dtype: torch.dtype | None, *, zero_contribution: Sequence[object] = ()) -> None:
        self._dtype = dtype
        self._zero_contribution = zero_contribution

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocates FSDP2's input and output buffers."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Fills ``output_tensor`` with this rank's part of the sum."""
        assert not async_op
        if self._zero_contribution:
            input_tensor.zero_()
        if self._dtype is None:
            _reduce_scatter(output_tensor, input_tensor, op=op, group=group)
            return
        sent = (input_tensor / group.size()).to(self._dtype)
        received = torch.empty_like(output_tensor, dtype=self._dtype)
        _reduce_scatter(received, sent, op=op, group=group)
        output_tensor.copy_(received).mul_(group.size())
