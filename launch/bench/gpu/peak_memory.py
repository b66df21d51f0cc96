"""The memory of a window: what is held between windows, and the most that is allocated within one."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch

from launch.bench.gpu.figures import Figure
from launch.bench.memory import live_storages
from launch.bench.throughput import profiled_peak_bytes

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Bytes of tensors: ``held`` when the window begins, and ``most`` at any moment of it."""

    held: int
    most: int

    def figures(self, of: str) -> list[Figure]:
        """The peak, and what of it is a window's own."""
        return [Figure(of=of, name="peak memory", value=self.most / GIB, unit="GiB"), self.above(of)]

    def above(self, of: str) -> Figure:
        """What a window takes on top: activations, and what the step needs."""
        return Figure(of=of, name="peak memory above what is held", value=(self.most - self.held) / GIB, unit="GiB")


def peak_of_window(step: Callable[[], object], device: torch.device) -> Peak:
    """Of one window of a warmed-up loop."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        held = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        torch.cuda.synchronize(device)
        return Peak(held=held, most=torch.cuda.max_memory_allocated(device))
    held = sum(live_storages().values())
    return Peak(held=held, most=held + profiled_peak_bytes(lambda: step, windows=1))
