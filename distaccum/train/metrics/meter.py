"""The record of a logged window: its outcome, and the times since the record before."""

from __future__ import annotations

import os
from collections.abc import Callable
from math import inf
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from distaccum.accumulation.progress import Progress
from distaccum.accumulation.step import Outcome, all_reduce_loss_sums
from distaccum.data.window import Window
from distaccum.distributed.activity import Phase
from distaccum.distributed.world import World
from distaccum.train.metrics.loggers import refuse_taken

Record = dict[str, Any]
_PAGES = Path("/proc/self/statm")


class Utilization:
    """TFLOP/s and MFU of a run, from the samples of an interval.

    Args:
        flops: the operations of a sample; or what counts them in the first window, and gives None where it cannot.
        peak: operations per second of one rank's card; None where that is not known.
        ranks: of the run.
    """

    def __init__(self, flops: float | Callable[[Window], float | None], *, peak: float | None, ranks: int) -> None:
        self._flops: float | Callable[[Window], float | None] | None = flops
        self._peak, self._ranks = peak, ranks

    @property
    def is_measured(self) -> bool:
        """Whether :meth:`measure` has nothing left to do."""
        return not callable(self._flops)

    def measure(self, window: Window) -> None:
        """Counts, once, in a window that has samples on this rank."""
        if callable(self._flops) and window.micro_batches:
            self._flops = self._flops(window)

    def metrics(self, samples_per_s: float) -> dict[str, float]:
        """Of a record; ``samples_per_s`` is over all ranks."""
        flops = self._flops  # which the training's thread may change
        if flops is None or callable(flops):
            return {}
        rate = flops * samples_per_s / self._ranks
        return {"tflops_per_rank": rate / 1e12} | ({} if self._peak is None else {"mfu": rate / self._peak})


class Meter:
    """Accumulates over the windows since the last record; reads the device only when a record is made.

    Args:
        world: this rank.
        progress: at the beginning.
        utilization: of the cards, on the rank that logs; None where that is not known.
    """

    def __init__(self, world: World, progress: Progress, utilization: Utilization | None = None) -> None:
        self._world, self._utilization = world, utilization
        self._underflow: torch.Tensor | None = None
        self._logged: tuple[str, ...] = ()  # by a loss on any rank
        self._ended = inf  # the last window; its record may be due before one is run here
        self.waited_s = 0.0
        """Seconds that training has waited for data so far."""
        self.restart(progress)

    def restart(self, progress: Progress) -> None:
        """Restarts the interval, so that evaluation and saving count neither as training time nor in its memory."""
        self._began, self._waited, self._from = perf_counter(), 0.0, progress
        if self._world.device.type != "cpu":
            torch.get_device_module(self._world.device).reset_peak_memory_stats(self._world.device)

    def measure(self, window: Window) -> None:
        """Counts the operations of a window that is about to be run, if they are wanted and not counted yet.

        Its time is none of the interval's.
        """
        if self._utilization is None or self._utilization.is_measured:
            return
        began = perf_counter()
        self._utilization.measure(window)
        self._began += perf_counter() - began

    def add(self, window: Window, outcome: Outcome) -> None:
        """Adds one window, when it is done."""
        self._ended = perf_counter()
        waited = window.data_wait_s if window.device_wait_s is None else window.device_wait_s()
        self._waited += waited
        self.waited_s += waited
        if outcome.step is not None and outcome.step.underflow is not None:
            self._underflow = outcome.step.underflow
        refuse_taken(_names(outcome), "the loss logs")

    def record(self, window: Window, outcome: Outcome, progress: Progress, *, lr: float) -> Record:
        """The record of ``window``; ``progress`` includes it. A collective."""
        memory, activity = memory_of(self._world.device), self._world.activity
        before_this, activity.phase = activity.phase, Phase.RECORD
        new = _names(outcome) - {*self._logged}
        own = [*memory.values(), len(new)]
        sums = all_reduce_loss_sums(outcome, self._world, logged=self._logged, own=own)
        # The one host read of a logged step: all numbers at once.
        small = [outcome.grad_norm, *([] if self._underflow is None else [self._underflow])]
        numbers = torch.cat([sums, torch.stack([number.to(sums.dtype) for number in small])]).tolist()
        activity.phase = before_this
        first, end = len(outcome.counts), len(outcome.counts) + 2 * len(self._logged)
        totals, logged, of_ranks = numbers[:first], numbers[first:end], numbers[end : len(sums)]
        if any(of_ranks[len(memory) :: len(own)]):  # what a loss has not logged before: all ranks learn its name
            self._logged = self._world.all_gather_names([*self._logged, *new])
            return self.record(window, outcome, progress, lr=lr)
        grad_norm, *underflow = numbers[len(sums) :]
        worst = {name: int(max(of_ranks[i :: len(own)])) for i, name in enumerate(memory)}
        # A skip may be recorded late, when the next window has begun; its interval stays open.
        now = perf_counter()
        elapsed = (now if outcome.applied or self._ended > now else self._ended) - self._began
        before = self._from
        windows = max(1, progress.window - before.window)  # 0 where a checkpoint came between the update and its record
        losses = {name: total / (n or 1) for total, (name, n) in zip(totals, outcome.counts.items(), strict=True)}
        samples_per_s = (progress.samples - before.samples) / elapsed
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
            "samples_per_s": samples_per_s,
            "tokens_per_s": (progress.tokens - before.tokens) / elapsed,
            "step_time_s": elapsed / windows,
            "data_wait_s": self._waited / windows,
            **worst,
            **({} if self._utilization is None else self._utilization.metrics(samples_per_s)),
            **{name: total / n for name, total, n in zip(self._logged, logged[::2], logged[1::2], strict=True) if n},
        }
        if outcome.applied:
            self.restart(progress)
        return record


def _names(outcome: Outcome) -> set[str]:
    """What the loss logs on this rank."""
    return {name for unit in outcome.logged for name in unit}


def memory_of(device: torch.device) -> dict[str, int]:
    """Of a GPU the most bytes since the peak was reset, of tensors and reserved, and all retries of its allocator.

    Of a CPU the bytes of this process that are in memory now; empty where the system does not say so.
    """
    if device.type != "cpu":
        own = torch.get_device_module(device)
        return {
            "memory_bytes": own.max_memory_allocated(device),
            "memory_reserved_bytes": own.max_memory_reserved(device),
            "memory_retries": own.memory_stats(device).get("num_alloc_retries", 0),
        }
    if not _PAGES.exists():
        return {}
    return {"memory_bytes": int(_PAGES.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")}
