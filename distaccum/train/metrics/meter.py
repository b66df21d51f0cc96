"""The record of a logged window: its outcome, and the times since the record before."""

from __future__ import annotations

import resource
import sys
from time import perf_counter
from typing import Any

import torch

from distaccum.accumulation.progress import Progress
from distaccum.accumulation.step import Outcome, all_reduce_loss_sums
from distaccum.data.window import Window
from distaccum.distributed.world import World

Record = dict[str, Any]


class Meter:
    """Accumulates over the windows since the last record; reads the device only when a record is made."""

    def __init__(self, world: World, progress: Progress) -> None:
        self._world = world
        self._underflow: torch.Tensor | None = None
        self.restart(progress)

    def restart(self, progress: Progress) -> None:
        """Restarts the interval, so that evaluation and saving do not count as training time."""
        self._began, self._waited, self._from = perf_counter(), 0.0, progress

    def add(self, window: Window, outcome: Outcome) -> None:
        """Adds one window, when it is done."""
        self._ended = perf_counter()
        self._waited += window.data_wait_s
        if outcome.step is not None and outcome.step.underflow is not None:
            self._underflow = outcome.step.underflow

    def record(self, window: Window, outcome: Outcome, progress: Progress, *, lr: float) -> Record:
        """The record of ``window``; ``progress`` includes it. A collective."""
        sums = all_reduce_loss_sums(outcome, self._world)
        # The one host read of a logged step: all numbers at once.
        small = [outcome.grad_norm, *([] if self._underflow is None else [self._underflow])]
        numbers = torch.cat([sums, torch.stack([number.to(sums.dtype) for number in small])]).tolist()
        totals, (grad_norm, *underflow) = numbers[: len(sums)], numbers[len(sums) :]
        # A skip may be recorded late, when the next window has begun; its interval stays open.
        elapsed = (perf_counter() if outcome.applied else self._ended) - self._began
        before = self._from
        windows = max(1, progress.window - before.window)  # 0 where a checkpoint came between the update and its record
        losses = {name: total / (n or 1) for total, (name, n) in zip(totals, outcome.counts.items(), strict=True)}
        record = {
            "step": progress.step,
            "window": progress.window,
            "epoch": window.epoch,
            "loss": sum(losses.values()),
            **({} if len(losses) == 1 else {f"loss_{name}": loss for name, loss in losses.items()}),
            "grad_norm": grad_norm,
            "lr": lr,
            "loss_scale": outcome.loss_scale,
            "applied": outcome.applied,
            "skipped": progress.skipped,
            "nonfinite": progress.nonfinite,
            **({"underflow_share": underflow[0]} if underflow else {}),
            "samples": progress.samples,
            "tokens": int(progress.tokens) if float(progress.tokens).is_integer() else progress.tokens,
            "samples_per_s": (progress.samples - before.samples) / elapsed,
            "tokens_per_s": (progress.tokens - before.tokens) / elapsed,
            "step_time_s": elapsed / windows,
            "data_wait_s": self._waited / windows,
            "memory_bytes": _peak_memory(self._world.device),
        }
        if outcome.applied:
            self.restart(progress)
        return record


def _peak_memory(device: torch.device) -> int:
    """Peak bytes of tensors on a GPU, or of this process's host memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
