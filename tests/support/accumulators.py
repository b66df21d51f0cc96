"""Accumulators of tests that train by plain SGD."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import SGD

from distaccum import Accumulator


def over_sgd(model: nn.Module, lr: float, sizes: tuple[int, int], **settings: Any) -> Accumulator:
    """``sizes``: global batch and micro-batch, in samples."""
    optimizer = SGD(model.parameters(), lr=lr)
    return Accumulator(model, optimizer, global_batch_size=sizes[0], micro_batch_size=sizes[1], **settings)
