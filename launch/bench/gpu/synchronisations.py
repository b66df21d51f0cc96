"""How often the host waits for the device in windows that log nothing."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from distaccum.testing.counters import OperationCounter
from launch.bench.throughput import count_calls
from launch.bench.variant import Step

WINDOWS = 8
_WARNING = "called a synchronizing CUDA operation"


@contextmanager
def synchronizing_operators() -> Iterator[list[warnings.WarningMessage]]:
    """Torch's warnings of each operator within the block that waits for a GPU, in a list that fills."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield told
        finally:
            torch.cuda.set_sync_debug_mode("default")


def synchronisations(step: Step, device: torch.device, windows: int = WINDOWS) -> dict[str, float]:
    """Over ``windows`` of a warmed-up loop: operators that wait, reads of what was queued last, and late reads.

    A late read asks whether an earlier window was applied: the device has finished that one, so nobody waits.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        with synchronizing_operators() as told:
            for _ in range(windows):
                step()
        waiting = sum(_WARNING in str(warning.message) for warning in told)
    else:  # nothing waits for a CPU: what would, reads a number
        with OperationCounter() as operators:
            for _ in range(windows):
                step()
        waiting = operators.counts["device reads"]
    reads = count_calls(step, windows)
    return {
        "operators that wait": float(waiting),
        "reads of what was queued last": windows * reads["device reads"],
        "late reads": windows * reads["late reads"],
    }
