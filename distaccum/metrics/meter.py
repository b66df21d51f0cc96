"""Turns the outcome of a logged window, and the time since the last one, into a record."""

from __future__ import annotations

import resource
import sys
from time import perf_counter
from typing import Any

import torch

from distaccum.clocks import Clocks
from distaccum.errors import NonFiniteError
from distaccum.window import Outcome, Window
from distaccum.world import World

Record = dict[str, Any]


class Meter:
    """Sums over the windows since the last record; reads the device only when a record is made."""

    def __init__(self, world: World, clocks: Clocks) -> None:
        self._world = world
        self._finite: torch.Tensor | None = None
        self.restart(clocks)

    def restart(self, clocks: Clocks) -> None:
        """Starts the interval anew, so that evaluation and saving do not count as training time."""
        self._began, self._waited, self._from = perf_counter(), 0.0, clocks

    def add(self, window: Window, outcome: Outcome) -> None:
        """Takes note of one update."""
        self._waited += window.data_wait_s
        self._finite = outcome.finite if self._finite is None else self._finite * outcome.finite

    def check_finite(self) -> None:
        """Raises NonFiniteError, on every rank alike, if the gradient of any window so far was NaN or infinite."""
        # Host read: asked for when a checkpoint or an evaluation is due, which wait for the device anyway.
        self._raise_unless(1.0 if self._finite is None else float(self._finite))

    def record(self, window: Window, outcome: Outcome, clocks: Clocks, *, lr: float) -> Record:
        """The record of ``window``; a collective.

        Raises:
            NonFiniteError: on every rank alike, as :meth:`check_finite`.
        """
        assert self._finite is not None
        # fp64: a rank without a micro-batch does not know in what the others' losses are computed.
        sums = self._world.sum_(torch.stack(list(outcome.loss_sums.values())).double().unsqueeze(1)).squeeze(1)
        # The one host read of a logged step: all numbers at once.
        small = torch.stack([outcome.grad_norm.to(sums.dtype), self._finite.to(sums.dtype)])
        *totals, grad_norm, finite = torch.cat([sums, small]).tolist()
        elapsed, before = perf_counter() - self._began, self._from
        windows = max(1, clocks.window - before.window)  # 0 where a checkpoint came between the update and its record
        self._raise_unless(finite)
        losses = {name: total / (n or 1) for total, (name, n) in zip(totals, outcome.counts.items(), strict=True)}
        record = {
            "step": clocks.step,
            "window": clocks.window,
            "epoch": window.epoch,
            "loss": sum(losses.values()),
            **({} if len(losses) == 1 else {f"loss_{name}": loss for name, loss in losses.items()}),
            "grad_norm": grad_norm,
            "lr": lr,
            "loss_scale": 1.0,
            "applied": True,
            "skipped": clocks.skipped,
            "samples": clocks.samples,
            "tokens": int(clocks.tokens) if float(clocks.tokens).is_integer() else clocks.tokens,
            "samples_per_s": (clocks.samples - before.samples) / elapsed,
            "tokens_per_s": (clocks.tokens - before.tokens) / elapsed,
            "step_time_s": elapsed / windows,
            "data_wait_s": self._waited / windows,
            "memory_bytes": _peak_memory(self._world.device),
        }
        self.restart(clocks)
        return record

    def _raise_unless(self, finite: float) -> None:
        if not finite:
            raise NonFiniteError(
                "the gradient of a window since the last check is NaN or infinite; the run stops before it saves "
                "anything made from it. Resume from the last checkpoint with a lower optim.lr, or look at the data"
            )


def _peak_memory(device: torch.device) -> int:
    """Bytes: the most that tensors took on a GPU, or that this process took of the host's memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
