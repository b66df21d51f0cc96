"""Keras's losses as sums with counts: a loss value for each sample, or each position, of which Keras takes the mean."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from distaccum.errors import ConfigError, MisuseError

_MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")
_COUPLED = {
    "Circle": "compares the samples of a micro-batch with each other",
    "Dice": "is a ratio of sums over the micro-batch",
    "Tversky": "is a ratio of sums over the micro-batch",
}
_SPARSE = "SparseCategoricalCrossentropy"


class KerasLoss:
    """A loss of Keras over a batch ``(inputs, targets)`` or ``(inputs, targets, sample_weight)``.

    It counts what Keras's own mean divides by: the loss values of the whole global batch, or with the reduction
    ``mean_with_sample_weight`` the sum of the weights. Samples are weighted as Keras does.

    Args:
        loss: an object, as ``keras.losses.MeanSquaredError()``. Its reduction is a mean; it is not called, but what it
            computes for each sample.

    Raises:
        ConfigError: it is none, or its reduction is no mean; or it couples samples, or leaves out some by itself.
    """

    def __init__(self, loss: Any) -> None:
        kinds = {kind.__name__ for kind in type(loss).__mro__ if kind.__module__.startswith("keras.")}
        name = type(loss).__name__
        if "Loss" not in kinds:
            shown = getattr(loss, "__name__", loss)
            remedy = "Give an object, as keras.losses.MeanSquaredError()"
            raise ConfigError("loss", shown, "is no keras.losses.Loss", remedy)
        if loss.reduction not in _MEANS:
            problem = f"({name}) is no mean, and every loss is divided by its count over the global batch"
            raise ConfigError("loss.reduction", loss.reduction, problem, f"Use one of {', '.join(_MEANS)}")
        for kind, problem in _COUPLED.items():
            if kind in kinds:
                remedy = "Use a loss that is a sum over samples"
                raise ConfigError("loss", name, f"{problem}, and is no sum over samples", remedy)
        if getattr(loss, "ignore_class", None) is not None:
            problem = f"({name}) leaves targets out, and Keras divides by the rest of a micro-batch"
            raise ConfigError("loss.ignore_class", loss.ignore_class, problem, "Use distaccum.CrossEntropy")
        self._loss, self._sparse = loss, _SPARSE in kinds
        self._by_weight = loss.reduction == "mean_with_sample_weight"

    def count(self, batch: Any) -> float:
        """The loss values of the batch; or the sum of its weights.

        Raises:
            MisuseError: the batch is no tuple of inputs, targets and maybe weights, or weights are not one a value.
        """
        _, targets, weights = _parts(batch)
        values = self._values(targets)
        if weights is None:
            return float(values)
        if weights.numel() != values:
            problem = f"the batch has {weights.numel()} weights for {values} loss values"
            raise MisuseError(f"{problem} of {type(self._loss).__name__}: give one for each")
        return float(weights.double().sum()) if self._by_weight else float(values)

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """The weighted sum of the loss values.

        Raises:
            MisuseError: the outputs carry a mask of Keras, or the loss gives another number of values than it counts.
        """
        inputs, targets, weights = _parts(batch)
        output = _call(model, inputs)
        name = type(self._loss).__name__
        if getattr(output, "_keras_mask", None) is not None:
            problem = "the model's output carries a mask of Keras, and its mean would be over what the mask leaves"
            raise MisuseError(f"{problem}: build it without mask_zero and Masking, and weight the samples in the batch")
        values: Tensor = self._loss.call(targets.to(output.device), _as(output, self._loss.dtype))
        if values.numel() != self._values(targets) or not values.ndim:
            problem = f"{name} gives {values.numel()} loss values for targets of shape {tuple(targets.shape)}"
            raise MisuseError(f"{problem}, and {self._values(targets)} are counted: give targets as Keras's guide does")
        if getattr(values, "_keras_mask", None) is not None:
            raise MisuseError(f"{name} leaves out targets by a mask: weight the samples in the batch")
        values = values.reshape(-1)
        return values.sum() if weights is None else (values * weights.reshape(-1).to(values)).sum()

    def predictions(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """The model's output, and the targets."""
        inputs, targets, _ = _parts(batch)
        return _call(model, inputs), targets

    def _values(self, targets: Tensor) -> int:
        """Keras takes the mean over the last axis, but for targets that are classes."""
        shape = targets.shape
        return math.prod(shape if self._sparse or len(shape) < 2 else shape[:-1])  # noqa: PLR2004  samples, and an axis


def _call(model: nn.Module, inputs: Any) -> Tensor:
    output = model(inputs)
    if not isinstance(output, Tensor):
        problem = f"the model gives a {type(output).__name__}, and the loss takes one tensor"
        raise MisuseError(f"{problem}: write a loss of your own for several outputs")
    return output


def _as(output: Tensor, dtype: str) -> Tensor:
    """In the loss's own type: under autocast an output has 16 bits."""
    return output.double() if dtype == "float64" else output.float()


def _parts(batch: Any) -> tuple[Any, Tensor, Tensor | None]:
    if isinstance(batch, Mapping) or not isinstance(batch, tuple | list) or len(batch) not in (2, 3):
        raise MisuseError("the batch is no (inputs, targets) or (inputs, targets, sample_weight): collate it so")
    inputs, targets, *weights = batch
    return inputs, targets, weights[0] if weights else None
