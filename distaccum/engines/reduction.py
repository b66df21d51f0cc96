"""What gradients travel in between ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def average_in(dtype: torch.dtype, ranks: int) -> Callable[[object, Any], Any]:
    """A hook for DDP that sends each bucket in ``dtype``, and puts the average back into it.

    Torch's own ``fp16_compress_hook`` casts before it divides: of 80000 and 20000 it makes infinity, though fp16 holds
    their average.
    """

    def average(whole: torch.Tensor) -> Any:
        sent = whole.div_(ranks).to(dtype)
        reduced = dist.all_reduce(sent, async_op=True).get_future()
        return reduced.then(lambda done: whole.copy_(done.value()[0]))

    return lambda _, bucket: average(bucket.buffer())  # DDP accepts its own annotations, as types, or none
