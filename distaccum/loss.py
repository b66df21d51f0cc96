"""Losses are sums with counts: the mean is taken once, by the count of the whole global batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distaccum.normaliser import Counts, Total, as_totals


class Loss(Protocol):
    """What a training objective offers: a sum and what it sums over. There is no base class.

    An objective of several losses gives both by name, and each is divided by its own count over the whole window::

        def count(self, batch): return {"language": tokens, "score": samples, "balance": 1}
        def __call__(self, model, batch): return {"language": ..., "score": 0.1 * ..., "balance": ...}
    """

    def count(self, batch: Any) -> float | Counts:
        """What the loss of ``batch`` sums over, read off the batch on the host, before any forward: a number of
        samples or tokens, or the sum of their weights."""

    def __call__(self, model: nn.Module, batch: Any) -> Total:
        """The loss of ``batch``, summed (not averaged) over its count: a 0-dim fp32 tensor."""


@runtime_checkable
class Scorer(Protocol):
    """A loss that can report more than itself in an evaluation."""

    def scores(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """0-dim sums over the batch's count, by name; the loss, or each of several, is one of them."""


def scores(loss: Loss, model: nn.Module, batch: Any) -> Mapping[str, Tensor]:
    """All sums that ``loss`` reports of ``batch`` in an evaluation."""
    return loss.scores(model, batch) if isinstance(loss, Scorer) else as_totals(loss(model, batch))


@runtime_checkable
class Predictor(Protocol):
    """A loss that can feed metrics such as those of torchmetrics in an evaluation."""

    def predictions(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """``(predictions, targets)`` of what the batch counts, as the metrics take them."""


def cross_entropy(logits: Tensor, labels: Tensor, *, ignore_index: int = -100) -> tuple[Tensor, Tensor]:
    """The summed cross entropy in nats (0-dim fp32), and how many labels it sums over (0-dim int64, where they lie).

    Args:
        logits: ``(*labels.shape, classes)``.
        labels: int64; those of value ``ignore_index`` neither contribute nor count.
    """
    return _cross_entropy_sum(logits, labels, ignore_index), (labels != ignore_index).sum()


def count_labels(labels: Tensor, *, ignore_index: int = -100) -> int:
    """How many labels are not ignored; on the host, so that labels on a device are read back."""
    return int(np.count_nonzero(labels.cpu().numpy() != ignore_index))


def from_mean(mean: Tensor, count: float | Tensor) -> Tensor:
    """The sum of a loss that was averaged over ``count`` items: 0 (and no NaN) where it was averaged over none.

    There the gradient is 0 as well for means of torch's own; one of your own must not divide by 0 inside: clamp it.
    """
    if isinstance(count, Tensor):
        return torch.where(count > 0, mean, torch.nan_to_num(mean)) * count
    return mean * count if count else torch.nan_to_num(mean) * 0.0


def _cross_entropy_sum(logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    # At least fp32, whatever the forward computed in: a sum over thousands of tokens is beyond 16 bits.
    flat = logits.flatten(0, -2)
    flat = flat if flat.dtype == torch.float64 else flat.float()
    return F.cross_entropy(flat, labels.flatten(), ignore_index=ignore_index, reduction="sum")


class CrossEntropy:
    """Cross entropy, in nats, of batches ``(inputs, labels)``.

    ``model(inputs)`` gives logits of shape ``(*labels.shape, classes)``, so ``(B, T, V)`` for tokens.

    Args:
        ignore_index: labels of this value neither contribute nor count.
    """

    def __init__(self, *, ignore_index: int = -100) -> None:
        self.ignore_index = ignore_index

    def count(self, batch: tuple[Tensor, Tensor]) -> int:
        """Labels that are not ignored."""
        return count_labels(batch[1], ignore_index=self.ignore_index)

    def __call__(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The summed cross entropy, 0-dim fp32."""
        inputs, labels = batch
        return _cross_entropy_sum(model(inputs), labels, self.ignore_index)

    def scores(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """The summed cross entropy, and ``accuracy`` as the number of labels that the largest logit names."""
        inputs, labels = batch
        logits = model(inputs)
        total = _cross_entropy_sum(logits, labels, self.ignore_index)
        return {"loss": total, "accuracy": (logits.argmax(-1) == labels).sum()}

    def predictions(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Logits ``(n, classes)`` and labels ``(n,)`` of the labels that are not ignored."""
        inputs, labels = batch
        counted = labels != self.ignore_index
        return model(inputs)[counted], labels[counted]
