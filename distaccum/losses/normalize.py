"""The one normaliser: sums of losses, divided once by what the whole window counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import log2
from typing import Any

import torch
from torch import Tensor

from distaccum.errors import MisuseError

Counts = Mapping[str, float]
"""By loss: what it averages over. A single loss goes by the name ``loss``."""
Count = Callable[[Any], float | Counts]
LossSum = Tensor | Mapping[str, Tensor]

SINGLE = "loss"


def as_counts(count: float | Counts) -> Counts:
    """Counts by name; a bare number is the single loss's.

    Raises:
        MisuseError: a count is negative, or not a number on the host.
    """
    counts = count if isinstance(count, Mapping) else {SINGLE: count}
    for name, value in counts.items():
        if isinstance(value, Tensor) or not value >= 0:
            problem = f"the count of {name!r} is {value!r}: give a number that is at least 0, read on the host"
            raise MisuseError(problem)
    return counts


def nearest_power_of_two(count: float) -> float:
    """The power of two next to a count, so that dividing by it first and mending that later loses no digit; 1 for 0."""
    return 2.0 ** round(log2(count)) if count else 1.0


def as_loss_sums(total: LossSum) -> Mapping[str, Tensor]:
    """Totals by name; a bare tensor is the single loss's."""
    return {SINGLE: total} if isinstance(total, Tensor) else total


def normalize_loss(total: LossSum, counts: Counts, gradient_divide_factor: int) -> Tensor:
    """What one micro-step backpropagates: ``total * gradient_divide_factor / count``, summed over the losses.

    Summed over the micro-batches of all ranks, and divided by ``gradient_divide_factor`` in the engine's reduction,
    that is the gradient of each loss's mean over the window.

    Args:
        total: the micro-batch's loss, summed over what it counts: 0-dim; or one for each of several losses, by name.
        counts: what the losses count in the whole window, over all ranks. One that counts nothing weighs nothing.
        gradient_divide_factor: by what the engine divides the summed gradient: the world size for DDP, 1 for
            a plain sum.

    Returns:
        0-dim.

    Raises:
        MisuseError: totals and counts go by different names, or a total has 16 bits.
    """
    totals = as_loss_sums(total)
    if totals.keys() != counts.keys():
        problem = f"the losses are {sorted(totals)}, and what was counted is {sorted(counts)}: use the same names"
        raise MisuseError(problem)
    for name, part in totals.items():
        if part.dtype in (torch.float16, torch.bfloat16):
            problem = f"the total of {name!r} is {part.dtype}, which rounds a sum and, in fp16, overflows"
            raise MisuseError(f"{problem}: convert before summing, as in x.float().sum()")
    weighed = [part * (gradient_divide_factor / counts[name] if counts[name] else 0.0) for name, part in totals.items()]
    result = weighed[0]
    for part in weighed[1:]:
        result = result + part
    return result
