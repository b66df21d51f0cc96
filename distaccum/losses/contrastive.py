"""Contrastive learning: each sample's two views against those of all other samples of the window."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from distaccum.errors import ConfigError, MisuseError


class InfoNCE:
    """Symmetric cross entropy in nats of which two embeddings are a pair, as CLIP trains: a ``WindowLoss``.

    The negatives of a sample are all other samples of the window, on all ranks; the loss is a mean over pairs.

    The model is called with a batch's tensors (by name, where it is a mapping) and returns two embeddings of each
    sample, ``(B, D)`` both. As a third it may return what their cosines are multiplied by (0-dim), as a learned
    ``logit_scale.exp()``; without one that is ``1 / temperature``.

    Source: A. Radford et al., "Learning Transferable Visual Models From Natural Language Supervision" (2021), figure 3.

    Args:
        temperature: of cosines, where the model returns none.

    Raises:
        ConfigError: the temperature is no positive number.
    """

    score_names = ("loss", "accuracy")

    def __init__(self, *, temperature: float = 0.07) -> None:
        if isinstance(temperature, bool) or not isinstance(temperature, int | float) or not 0 < temperature < math.inf:
            remedy = "Give a number such as 0.07; one that is learned is the model's, and its third output"
            raise ConfigError("loss.temperature", temperature, "no positive number", remedy)
        self.temperature = temperature

    def count(self, batch: Any) -> int:
        """The number of pairs."""
        first = next((leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim), None)
        if first is None:
            raise MisuseError("InfoNCE counts the rows of a batch's first tensor, and the batch has none")
        return len(first)

    def represent(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Both embeddings with norm 1, the first multiplied by the scale of the cosines.

        Raises:
            MisuseError: the model does not return two embeddings for each sample.
        """
        if isinstance(batch, Mapping):
            output: Any = model(**batch)
        else:
            output = model(*batch) if isinstance(batch, tuple | list) else model(batch)
        given = list(output) if isinstance(output, tuple | list) else [output]
        if len(given) not in (2, 3) or not all(isinstance(one, Tensor) for one in given) or _shape(given[0]) is None:
            shapes = [list(one.shape) if isinstance(one, Tensor) else type(one).__name__ for one in given]
            remedy = (
                "return two tensors (B, D) of one shape, and the scale of their cosines as a third if it is learned"
            )
            raise MisuseError(
                f"InfoNCE wants a model that returns two embeddings, and this one returns {shapes}: {remedy}"
            )
        first, second, *scale = given
        if first.shape != second.shape:
            problem = f"InfoNCE wants two embeddings of one shape, and these have {list(first.shape)}"
            raise MisuseError(f"{problem} and {list(second.shape)}")
        factor = scale[0].reshape(()) if scale else 1 / self.temperature
        return {"first": _normal(first) * factor, "second": _normal(second)}

    def __call__(self, representations: Mapping[str, Tensor]) -> Tensor:
        """The cross entropy of each sample's pair among all, both ways, halved and summed over the samples."""
        return self._sum(*self._logits(representations))

    def scores(self, representations: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The loss, and the pairs that are nearest to each other as ``accuracy``: the mean of both ways."""
        logits, right = self._logits(representations)
        found = (logits.argmax(0) == right).sum() + (logits.argmax(1) == right).sum()
        return {"loss": self._sum(logits, right), "accuracy": found / 2}

    def _logits(self, representations: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        logits = representations["first"] @ representations["second"].T
        return logits, torch.arange(len(logits), device=logits.device)

    def _sum(self, logits: Tensor, right: Tensor) -> Tensor:
        there, back = (F.cross_entropy(one, right, reduction="sum") for one in (logits, logits.T))
        return (there + back) / 2


def _shape(embedding: Tensor) -> tuple[int, int] | None:
    return (embedding.shape[0], embedding.shape[1]) if embedding.ndim == 2 else None  # noqa: PLR2004  samples, width


def _normal(embedding: Tensor) -> Tensor:
    wide = embedding if embedding.dtype == torch.float64 else embedding.float()
    return F.normalize(wide, dim=-1)
