"""Tensors of all ranks on every rank, with a gradient: for losses that compare a rank's samples with the others'."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distaccum.errors import MisuseError

_OF_TORCH, _WRONG = "torch.distributed.nn.functional", "_AllGather"
_DIMENSIONS = 16


def all_gather(tensor: Tensor, group: dist.ProcessGroup | None = None) -> tuple[Tensor, ...]:
    """The tensors of all ranks, in their order; a collective, and so is the backward.

    A gradient that reaches a rank's part on any rank goes back to that rank, where all are added up: a loss that every
    rank computes of what is gathered, as a sum over its own samples, has the gradient of the sum over all ranks.

    In place of ``torch.distributed.nn.functional.all_gather``, which over gloo gives another gradient where that comes
    back with permuted strides.

    Args:
        tensor: of one shape on all ranks.
        group: of the ranks; by default all.

    Raises:
        MisuseError: ranks have other shapes, or types of numbers; on all ranks.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return (tensor.clone(),)
    _expect_alike(tensor, group)
    gathered: tuple[Tensor, ...] = _AllGather.apply(tensor, group)  # type: ignore[no-untyped-call]
    return gathered


def _expect_alike(tensor: Tensor, group: dist.ProcessGroup | None) -> None:
    own = [tensor.element_size(), tensor.is_floating_point(), tensor.is_complex(), tensor.ndim, *tensor.shape]
    numbers = torch.zeros(4 + _DIMENSIONS, dtype=torch.int64)
    numbers[: len(own)] = torch.tensor(own)
    numbers = numbers.to(tensor.device)
    every = [torch.empty_like(numbers) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, numbers, group=group)
    found = torch.stack(every).tolist()  # waits for the device: what follows would mix up ranks' numbers, or hang
    if any(one != found[0] for one in found):
        shapes = [one[4 : 4 + one[3]] for one in found]
        remedy = "drop the ragged end of the data, and choose sizes that all ranks share evenly"
        raise MisuseError(f"all_gather() of tensors of {shapes} (by rank), or of other types of numbers: {remedy}")


class _AllGather(torch.autograd.Function):
    walks_twice = True  # for the proof of a gradient, which walks a graph on all ranks before the engine does

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, ...]:
        ctx.group = group
        own = tensor.contiguous()
        every = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(every, own, group=group)
        return tuple(every)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        parts = torch.stack([gradient.contiguous() for gradient in gradients])
        dist.all_reduce(parts, group=ctx.group)
        return parts[dist.get_rank(ctx.group)], None


def expect_none_of_torch(nodes: Iterable[Any]) -> None:
    """Raises MisuseError where torch's own ``all_gather`` is in a graph, on ranks that do not talk over NCCL."""
    for node in nodes:
        function: Any = getattr(type(node), "_forward_cls", None)
        if function is None or function.__name__ != _WRONG or function.__module__ != _OF_TORCH:
            continue
        backend = dist.get_backend(node.group)
        if "nccl" not in backend:
            problem = f"{_OF_TORCH}.all_gather gives a wrong gradient over {backend} where that has permuted strides"
            raise MisuseError(f"{problem}: use distaccum.all_gather, of the same arguments")
