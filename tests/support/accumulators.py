"""Accumulators of tests that train by plain SGD, and a loss."""

from __future__ import annotations

from typing import Any

from torch import Tensor, cat, nn
from torch.optim import SGD

from distaccum import Accumulator


class Loss:
    """The summed squares of what the model gives."""

    def count(self, batch: Tensor) -> int:
        return len(batch)

    def __call__(self, model: nn.Module, batch: Tensor) -> Tensor:
        total: Tensor = (model(batch) - 1).square().sum()
        return total


def over_sgd(model: nn.Module, lr: float, sizes: tuple[int, int], **settings: Any) -> Accumulator:
    """``sizes``: global batch and micro-batch, in samples."""
    optimizer = SGD(model.parameters(), lr=lr)
    return Accumulator(model, optimizer, global_batch_size=sizes[0], micro_batch_size=sizes[1], **settings)


def weights(acc: Accumulator) -> Tensor:
    """A copy of all of them in one tensor; of an engine that has them whole."""
    return cat([p.detach().flatten().clone() for p in acc.engine.unwrapped_model.parameters()])
