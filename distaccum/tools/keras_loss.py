"""Keras's losses as sums with counts: a loss value for each sample, or each position, of which Keras takes the mean."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
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

    It counts what Keras's own mean divides by: the loss values of the whole global batch that no mask leaves out, or
    with the reduction ``mean_with_sample_weight`` the sum of their weights. Samples are weighted as Keras does. The
    model's regularizers are added to the mean once, as Keras does.

    Args:
        loss: an object, as ``keras.losses.MeanSquaredError()``. Its reduction is a mean; it is not called, but what it
            computes for each sample.
        mask: for a model with ``mask_zero`` or ``Masking``: ``mask(inputs)`` gives what the output's mask will be, as
            ``lambda ids: ids != 0``, since the count has to be known before the forward.

    Raises:
        ConfigError: it is none, or its reduction is no mean; or it couples samples.
    """

    def __init__(self, loss: Any, mask: Callable[[Any], Tensor] | None = None) -> None:
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
        self._loss, self._sparse = loss, _SPARSE in kinds
        self._mask, self._compared = mask, False
        self._ignored = getattr(loss, "ignore_class", None)
        self._by_weight = loss.reduction == "mean_with_sample_weight"

    def count(self, batch: Any) -> float:
        """The loss values of the batch that no mask leaves out; or the sum of their weights.

        Raises:
            MisuseError: the batch is no tuple of inputs, targets and maybe weights, or weights or a mask are not one a
                value.
        """
        inputs, targets, weights = _parts(batch)
        return float(self._counted(targets, weights, self._kept(inputs, targets)))

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """The weighted sum of the loss values.

        Raises:
            MisuseError: the outputs carry another mask of Keras than is given, or the loss gives another number of
                values than it counts.
        """
        inputs, targets, weights = _parts(batch)
        output = _call(model, inputs)
        name, kept = type(self._loss).__name__, self._kept(inputs, targets)
        parts: list[Any] = [one for one in model.modules() if hasattr(type(one), "penalty")]  # not its wrapper
        for part in parts:
            if part.masked is not None:
                self._compare(part.masked, inputs)
        values: Tensor = self._loss.call(targets.to(output.device), _as(output, self._loss.dtype))
        if values.numel() != self._values(targets) or not values.ndim:
            problem = f"{name} gives {values.numel()} loss values for targets of shape {tuple(targets.shape)}"
            raise MisuseError(f"{problem}, and {self._values(targets)} are counted: give targets as Keras's guide does")
        if getattr(values, "_keras_mask", None) is not None and self._ignored is None:
            raise MisuseError(f"{name} leaves out targets by a mask: weight the samples in the batch")
        values = values.reshape(-1)
        for factor in (weights, kept):
            values = values if factor is None else values * factor.reshape(-1).to(values)
        total = values.sum()
        for part in parts:  # a share of the window's count each time: of all micro-batches and ranks together once
            if (penalty := part.penalty()) is not None:
                total = total + (penalty * self._counted(targets, weights, kept)).to(total.dtype)
        return total

    def predictions(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """The model's output, and the targets."""
        inputs, targets, _ = _parts(batch)
        return _call(model, inputs), targets

    def _counted(self, targets: Tensor, weights: Tensor | None, kept: Tensor | None) -> Tensor | int:
        """What Keras's mean divides by; on the device, where the batch is."""
        values, name = self._values(targets), type(self._loss).__name__
        for what, given in (("weights", weights), ("entries of a mask", kept)):
            if given is not None and given.numel() != values:
                problem = f"the batch has {given.numel()} {what} for {values} loss values"
                raise MisuseError(f"{problem} of {name}: give one for each")
        if weights is None or not self._by_weight:
            return values if kept is None else kept.sum()
        weights = weights.reshape(-1).double()
        return (weights if kept is None else weights * kept.reshape(-1)).sum()

    def _kept(self, inputs: Any, targets: Tensor) -> Tensor | None:
        """Which loss values no mask leaves out; None: there is no mask."""
        kept = None if self._mask is None else self._mask(inputs).bool()
        if self._ignored is not None:
            labelled = targets != self._ignored
            kept = labelled if kept is None else labelled.reshape(-1) & kept.reshape(-1).to(targets.device)
        return kept

    def _compare(self, masked: Tensor, inputs: Any) -> None:
        """Refuses a mask of the model that is not the one that is counted by."""
        if self._mask is None:
            problem = "the model's output carries a mask of Keras, by which its mean is over what the mask leaves"
            raise MisuseError(f"{problem}: say it beforehand, as in KerasLoss(loss, mask=lambda ids: ids != 0)")
        if self._compared and masked.device.type != "cpu":
            return
        self._compared, counted = True, self._mask(inputs).bool().to(masked.device)
        if counted.numel() != masked.numel() or not torch.equal(counted.reshape(-1), masked.bool().reshape(-1)):
            kept, own = int(counted.sum()), int(masked.sum())  # host reads, as the comparison is: of the first one
            problem = f"mask= leaves {kept} values of a micro-batch, and the mask of the model's output {own}"
            raise MisuseError(f"{problem}: give the function of the inputs that the model's layers compute")

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
