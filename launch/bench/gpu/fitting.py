"""The largest micro-batch that fits into a card."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

T = TypeVar("T")


def release(device: torch.device) -> None:
    """Gives back what nothing refers to any more, compiled code included: the next run finds the memory whole."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def at_largest(measure: Callable[[int], T], micro_sizes: Sequence[int], device: torch.device) -> T:
    """What ``measure`` gives at the first of these micro-batch sizes at which memory is not over.

    Raises:
        torch.OutOfMemoryError: it is at all of them.
    """
    *larger, smallest = micro_sizes
    for micro_size in larger:
        try:
            return measure(micro_size)
        except torch.OutOfMemoryError:
            pass
        release(device)  # here: the error held the run that failed
    return measure(smallest)


def estimate(peak: Callable[[int], int], room: float, *, trials: tuple[int, int], most: int) -> list[int]:
    """Micro-batch sizes to try, the largest first.

    A window's peak grows by as much with each sample: two small ones tell how many have room.

    Args:
        peak: bytes at a micro-batch size.
        room: bytes that there are.
        trials: the two sizes, the smaller first.
        most: the largest size that is wanted.
    """
    few, many = trials
    least = peak(few)
    each = max(1.0, (peak(many) - least) / (many - few))
    fits = min(most, int(few + (room - least) / each))
    sizes = [max(few, int(fits * share)) for share in (1.0, 0.85, 0.7)]
    return sorted({size - size % few for size in sizes}, reverse=True)
