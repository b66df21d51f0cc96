"""Accumulators of tests that train by plain SGD, and losses."""

from collections.abc import Callable
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


class Of:
    """A sum that a function makes of model and batch, over the batch's samples or what ``count`` finds in it."""

    def __init__(self, function: Callable[[Any, Any], Tensor], count: Callable[[Any], int] = len) -> None:
        self._function, self._count = function, count

    def count(self, batch: Any) -> int:
        return self._count(batch)

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        return self._function(model, batch)


def _squared_errors(model: nn.Module, batch: Any) -> Tensor:
    total: Tensor = (model(batch[0]).float() - batch[1]).square().sum()
    return total


SQUARED_ERRORS = Of(_squared_errors, count=lambda batch: len(batch[0]))  # of pairs


def over_sgd(model: nn.Module, lr: float, sizes: tuple[int, int], **settings: Any) -> Accumulator:
    """``sizes``: global batch and micro-batch, in samples."""
    optimizer = SGD(model.parameters(), lr=lr)
    return Accumulator(model, optimizer, global_batch_size=sizes[0], micro_batch_size=sizes[1], **settings)


def weights(acc: Accumulator) -> Tensor:
    """A copy of all of them in one tensor; of an engine that has them whole."""
    return cat([p.detach().flatten().clone() for p in acc.engine.unwrapped_model.parameters()])
