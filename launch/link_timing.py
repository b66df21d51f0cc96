"""How long micro-steps and updates take where nothing is sent: what a forecast is told about a machine."""

from __future__ import annotations

from statistics import median
from time import perf_counter

import torch
from torch import nn

from distaccum.data.prefetch import to_device
from distaccum.data.window import Window
from distaccum.losses.normalize import normalize_loss
from distaccum.train.components import TrainingComponents

MILLI = 1e-3


class Local:
    """A model of its own on this rank alone, trained on windows by a plain loop; each of its steps is timed."""

    def __init__(self, parts: TrainingComponents, device: torch.device) -> None:
        self._parts, self._device = parts, device
        self._model = parts.model.to(device)
        self._micro_steps: list[float] = []
        self._updates: list[float] = []

    def run(self, window: Window) -> None:
        """Forward and backward of each micro-batch, then clipping and the optimizers' step."""
        began = self._now()
        for micro in window.micro_batches:
            batch = to_device(micro.batch, self._device)
            with self._parts.policy.autocast(self._device):
                total = self._parts.loss(self._model, batch)
            normalize_loss(total, window.counts, gradient_divide_factor=1).backward()
        self._micro_steps.append((self._now() - began) / len(window.micro_batches))
        began = self._now()
        clip_norm = self._parts.config.optim.clip_norm
        if clip_norm:
            nn.utils.clip_grad_norm_(self._model.parameters(), clip_norm)
        for optimizer in self._parts.optimizers:
            optimizer.step()
        for parameter in self._model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        self._updates.append(self._now() - began)

    def forget(self) -> None:
        """What was timed so far."""
        self._micro_steps.clear()
        self._updates.clear()

    @property
    def micro_step_ms(self) -> float:
        """The mean of a window, and the median of these."""
        return median(self._micro_steps) / MILLI

    @property
    def update_ms(self) -> float:
        """The median."""
        return median(self._updates) / MILLI

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return perf_counter()
