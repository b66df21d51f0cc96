"""Losses are sums with counts: the mean is taken once, by the count of the whole global batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Loss(Protocol):
    """What a training objective offers. A function pair is enough; there is no base class."""

    def count(self, batch: Any) -> int:
        """How many items the loss of ``batch`` sums over, read off the batch on the host, before any forward."""

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss of ``batch``, summed (not averaged) over its count: a 0-dim fp32 tensor."""


@runtime_checkable
class Scorer(Protocol):
    """A loss that can report more than itself in an evaluation."""

    def scores(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """0-dim sums over the batch's count, by name; ``loss`` is one of them."""


def scores(loss: Loss, model: nn.Module, batch: Any) -> dict[str, Tensor]:
    """All sums that ``loss`` reports of ``batch`` in an evaluation."""
    return loss.scores(model, batch) if isinstance(loss, Scorer) else {"loss": loss(model, batch)}


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
        return int(np.count_nonzero(batch[1].numpy() != self.ignore_index))

    def __call__(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The summed cross entropy, 0-dim fp32."""
        inputs, labels = batch
        return self._sum(model(inputs), labels)

    def scores(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """The summed cross entropy, and ``accuracy`` as the number of labels that the largest logit names."""
        inputs, labels = batch
        logits = model(inputs)
        return {"loss": self._sum(logits, labels), "accuracy": (logits.argmax(-1) == labels).sum()}

    def _sum(self, logits: Tensor, labels: Tensor) -> Tensor:
        # fp32 whatever the forward computed in: a sum over thousands of tokens is beyond 16 bits.
        flat = logits.flatten(0, -2).float()
        return F.cross_entropy(flat, labels.flatten(), ignore_index=self.ignore_index, reduction="sum")


def to_device(batch: Any, device: torch.device) -> Any:
    """``batch`` with every tensor in mappings, lists and (named) tuples on ``device``; copies do not block the host."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device) for value in batch)
    return batch
