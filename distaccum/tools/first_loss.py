"""Is a classifier's first loss ``ln(classes)`` divided by a number that the step is made of?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from distaccum.data.batches import map_tensors

_NEAR = 5e-2  # to ln(classes) times a factor


class FirstLoss:
    """Notes, as a context, how many classes the model's outputs tell apart.

    Args:
        model: whose forwards are looked at.
    """

    def __init__(self, model: nn.Module) -> None:
        self._classes = set[int]()
        self._hook = model.register_forward_hook(lambda *call: self._classes.add(_classes(call[-1])))

    def __enter__(self) -> FirstLoss:
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()

    def in_words(self, losses: Mapping[str, float], count: float, batch: Any, factors: Mapping[str, float]) -> str:
        """What is suspicious; empty where nothing is, or the model is no classifier.

        Args:
            losses: by name, of a batch that counts ``count``.
            count: what they are divided by.
            batch: one of those that the model was given.
            factors: numbers that the step is made of, by name.
        """
        if len(losses) != 1 or len(self._classes) != 1 or not count:
            return ""
        (loss,), (classes,) = losses.values(), self._classes
        known = classes > 1 and _has_labels(batch, classes)
        return suspicious_first_loss(loss / count, classes, factors) if known else ""


def suspicious_first_loss(mean: float, classes: int, factors: Mapping[str, float]) -> str:
    """In words, a first loss that is ``ln(classes)`` over one of ``factors``, or all of them; empty where it is not.

    An untrained classifier gives every class about the same probability.
    """
    factors = {**factors, " x ".join(factors): math.prod(factors.values())}
    for name, factor in factors.items():
        if factor != 1.0 and abs(mean * factor / math.log(classes) - 1.0) < _NEAR:
            return (
                f"the first loss is {mean:.4g}, and ln({classes}) = {math.log(classes):.4g} is {factor:g} times that, "
                f"as many as there are {name}: is the loss divided by them?"
            )
    return ""


def _has_labels(batch: Any, classes: int) -> bool:
    """Whether a batch holds whole numbers that may be classes: a regression's loss is no logarithm of anything."""
    found: list[bool] = []

    def look(tensor: Tensor) -> None:
        whole = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)
        found.append(whole and tensor.numel() > 0 and 0 <= int(tensor.max()) < classes)

    map_tensors(batch, look)
    return any(found)


def _classes(output: Any) -> int:
    """The last dimension of a model's output, as logits have it; 0 of an output with none."""
    output = getattr(output, "logits", output)
    return output.shape[-1] if isinstance(output, Tensor) and output.ndim > 1 else 0
