"""Times micro-steps and updates on one rank, without communication: what a forecast has to know about a machine."""

from __future__ import annotations

from statistics import median
from time import perf_counter

import torch
from torch import nn

from distaccum.accumulation.two_pass import of_micro_batch
from distaccum.data.batches import to_device
from distaccum.data.window import Window
from distaccum.losses.normalize import normalize_loss
from distaccum.train.components import TrainingComponents

MILLI = 1e-3


class LocalTimer:
    """Trains a model on this rank alone, window by window in a plain loop, and times its steps."""

    def __init__(self, components: TrainingComponents, device: torch.device) -> None:
        self._components, self._device = components, device
        self._model = components.model.to(device)
        self._micro_steps: list[float] = []
        self._updates: list[float] = []

    def run(self, window: Window) -> None:
        """Forward and backward of each micro-batch, then clipping and the optimizers' step."""
        began, loss = self._now(), of_micro_batch(self._components.loss, window.counts)
        for micro in window.micro_batches:
            batch = to_device(micro.batch, self._device)
            with self._components.policy.autocast(self._device):
                total = loss(self._model, batch)
            normalize_loss(total, window.counts, gradient_divide_factor=1).backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self._micro_steps.append((self._now() - began) / len(window.micro_batches))
        began = self._now()
        clip_norm = self._components.config.optim.clip_norm
        if clip_norm:
            nn.utils.clip_grad_norm_(self._model.parameters(), clip_norm)
        for optimizer in self._components.optimizers:
            optimizer.step()
        for parameter in self._model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        self._updates.append(self._now() - began)

    def forget(self) -> None:
        """Drops what was timed so far."""
        self._micro_steps.clear()
        self._updates.clear()

    @property
    def micro_step_ms(self) -> float:
        """Milliseconds of a micro-step: the median over the windows of each window's mean."""
        return median(self._micro_steps) / MILLI

    @property
    def update_ms(self) -> float:
        """Milliseconds of an update: the median over the windows."""
        return median(self._updates) / MILLI

    def _now(self) -> float:
        if self._device.type != "cpu":
            torch.get_device_module(self._device).synchronize()
        return perf_counter()
