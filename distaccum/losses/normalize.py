"""The one normaliser: divides sums of losses by the counts of the whole window."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import log2
from typing import Any

import torch
from torch import Tensor

from distaccum.errors import MisuseError

Counts = Mapping[str, float]
"""The count that each loss averages over, by name. A single loss has the name ``loss``."""
Count = Callable[[Any], float | Counts]
LossSum = Tensor | Mapping[str, Tensor]

SINGLE = "loss"


def as_counts(count: float | Counts) -> Counts:
    """Counts by name; a bare number is the count of a single loss.

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
    """The power of two nearest to a count; 1 for 0. Dividing by a power of two is exact; the step corrects it."""
    return 2.0 ** round(log2(count)) if count else 1.0


def as_loss_sums(loss: LossSum) -> Mapping[str, Tensor]:
    """Sums by name; a bare tensor is a single loss."""
    return {SINGLE: loss} if isinstance(loss, Tensor) else loss


def normalize_loss(loss: LossSum, counts: Counts, gradient_divide_factor: int) -> Tensor:
    """The tensor that one micro-step backpropagates: ``loss * gradient_divide_factor / count``, added over the losses.

    Its gradients, summed over the micro-batches of all ranks and divided by ``gradient_divide_factor`` in the engine's
    reduction, are the gradient of each loss's mean over the window.

    Args:
        loss: the micro-batch's loss, summed over its items: 0-dim; or one for each of several losses, by name.
        counts: the counts of the whole window, over all ranks. A loss with a count of 0 adds nothing.
        gradient_divide_factor: what the engine divides the summed gradient by: the world size for DDP, 1 for
            a plain sum.

    Returns:
        0-dim.

    Raises:
        MisuseError: losses and counts have different names, or a loss has 16 bits.
    """
    sums = as_loss_sums(loss)
    if sums.keys() != counts.keys():
        problem = f"the losses are {sorted(sums)}, and what was counted is {sorted(counts)}: use the same names"
        raise MisuseError(problem)
    for name, part in sums.items():
        if part.dtype in (torch.float16, torch.bfloat16):
            problem = f"the total of {name!r} is {part.dtype}, which rounds a sum and, in fp16, overflows"
            raise MisuseError(f"{problem}: convert before summing, as in x.float().sum()")
    weighed = [part * (gradient_divide_factor / counts[name] if counts[name] else 0.0) for name, part in sums.items()]
    result = weighed[0]
    for part in weighed[1:]:
        result = result + part
    return result
