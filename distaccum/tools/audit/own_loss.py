"""The loss that a model returns itself, as those of transformers do: its sum, and the count it is a mean over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from distaccum.errors import MisuseError
from distaccum.losses.base import from_mean

IGNORED = -100
_WITHOUT = "say what the loop trains: audit(..., loss_sum=..., count=...), or --loss module:Loss"


class OwnLoss:
    """``model(**batch).loss`` times the labels that it is a mean over, for batches with ``labels``.

    Those are the labels that are not -100. A causal language model shifts its labels, so that the first of each row
    does not count.
    """

    def __init__(self) -> None:
        self._shifts = False

    def learn(self, model: nn.Module) -> None:
        """Finds out whether ``model`` shifts its labels: transformers say so by the name of its loss."""
        kind = getattr(model, "loss_type", None) or type(model).__name__
        self._shifts = "CausalLM" in kind or "LMHead" in kind

    @property
    def shift(self) -> str:
        """The shift in words, for a note."""
        return ", but for the first of each row, since the model shifts them" if self._shifts else ""

    def count(self, batch: Any) -> float:
        """The number of labels that the model's mean is over.

        Raises:
            MisuseError: there are no labels.
        """
        labels = batch.get("labels") if isinstance(batch, Mapping) else None
        if not isinstance(labels, Tensor):
            raise MisuseError(f"the batch has no labels: {_WITHOUT}")
        if labels.is_floating_point():
            return float(labels.numel())
        shifted = labels[..., 1:] if self._shifts else labels
        return float((shifted != IGNORED).sum())

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """The summed loss.

        Raises:
            MisuseError: the model's output has no loss.
        """
        output = model(**batch)
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if not isinstance(loss, Tensor):
            raise MisuseError(f"the model returns no loss: {_WITHOUT}")
        return from_mean(loss, self.count(batch))
