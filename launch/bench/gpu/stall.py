"""How long training stands still for a checkpoint, written in the background or not.

A window that ends with a save, less the median of those without one; the device is waited for after each window, so
that nothing of a save hides behind queued work.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch

from distaccum.train.callbacks import Callback, Run
from launch.bench.gpu.timing import synchronize
from launch.bench.variant import Step


class Published(Callback):
    """Counts the checkpoints that are complete."""

    def __init__(self) -> None:
        self.number = 0

    def on_checkpoint(self, run: Run, path: Path) -> None:
        """See ``Callback``."""
        self.number += 1


@dataclass(frozen=True, kw_only=True)
class Stalls:
    """Seconds that each save holds training up: its own window, and all windows until it is published.

    ``window_s``: of a window without a save. ``in_time``: whether each was published before the next one was due.
    """

    window_s: float
    at_once: list[float]
    in_all: list[float]
    in_time: bool


def window_times(
    step: Step, published: Published, device: torch.device, *, windows: int
) -> tuple[list[float], list[int]]:
    """Seconds of each window, and the checkpoints that were complete at its end."""
    times, complete = [], []
    synchronize(device)
    for _ in range(windows):
        began = perf_counter()
        step()
        synchronize(device)
        times.append(perf_counter() - began)
        complete.append(published.number)
    return times, complete


def stalls(times: Sequence[float], complete: Sequence[int], *, every: int, warm_up: int) -> Stalls:
    """What the saves at the end of every ``every``-th window cost, given what :func:`window_times` found.

    Args:
        times: of the windows from the run's first on.
        complete: the checkpoints that were complete at each window's end.
        every: windows between two saves.
        warm_up: windows at the beginning that are left out.
    """
    saved = range(every - 1, len(times), every)
    spans = []
    for order, first in enumerate(saved):
        published = [number for number in range(first, len(times)) if complete[number] > order]
        spans.append(range(first, published[0] + 1 if published else len(times)))
    busy = {number for span in spans for number in span}
    plain = statistics.median(t for number, t in enumerate(times) if number >= warm_up and number not in busy)
    return Stalls(
        window_s=plain,
        at_once=[times[first] - plain for first in saved],
        in_all=[sum(times[number] - plain for number in span) for span in spans],
        in_time=complete[-1] == len(saved) and all(len(span) <= every for span in spans),
    )
