"""Losses are sums with counts: the mean is taken once, by the count of the whole global batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from distaccum.losses.normalize import Counts, LossSum, as_loss_sums


class Loss(Protocol):
    """What a training objective offers: a sum and what it sums over. There is no base class.

    An objective of several losses gives both by name, and each is divided by its own count over the whole window::

        def count(self, batch): return {"language": tokens, "score": samples, "balance": 1}
        def __call__(self, model, batch): return {"language": ..., "score": 0.1 * ..., "balance": ...}
    """

    def count(self, batch: Any) -> float | Counts:
        """What the loss of ``batch`` sums over, read off the batch on the host, before any forward: a number of
        samples or tokens, or the sum of their weights."""

    def __call__(self, model: nn.Module, batch: Any) -> LossSum:
        """The loss of ``batch``, summed (not averaged) over its count: a 0-dim fp32 tensor."""


@runtime_checkable
class Scorer(Protocol):
    """A loss that can report more than itself in an evaluation."""

    def scores(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """0-dim sums over the batch's count, by name; the loss, or each of several, is one of them."""


def scores(loss: Loss, model: nn.Module, batch: Any) -> Mapping[str, Tensor]:
    """All sums that ``loss`` reports of ``batch`` in an evaluation."""
    return loss.scores(model, batch) if isinstance(loss, Scorer) else as_loss_sums(loss(model, batch))


@runtime_checkable
class Predictor(Protocol):
    """A loss that can feed metrics such as those of torchmetrics in an evaluation."""

    def predictions(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """``(predictions, targets)`` of what the batch counts, as the metrics take them."""


def from_mean(mean: Tensor, count: float | Tensor) -> Tensor:
    """The sum of a loss that was averaged over ``count`` items: 0 (and no NaN) where it was averaged over none.

    There the gradient is 0 as well for means of torch's own; one of your own must not divide by 0 inside: clamp it.
    """
    if isinstance(count, Tensor):
        return torch.where(count > 0, mean, torch.nan_to_num(mean)) * count
    return mean * count if count else torch.nan_to_num(mean) * 0.0
