"""The interface of losses: a sum and its count. The mean is taken once, over the whole global batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from distaccum.errors import MisuseError
from distaccum.losses.normalize import SINGLE, Counts, LossSum, as_counts, as_loss_sums, refuse_loss


class Loss(Protocol):
    """A training objective: a sum, and the count that it sums over. No base class is needed.

    An objective of several losses returns both by name, and each is divided by its own count over the whole window::

        def count(self, batch): return {"language": tokens, "score": samples, "balance": 1}
        def __call__(self, model, batch): return {"language": ..., "score": 0.1 * ..., "balance": ...}
    """

    def count(self, batch: Any) -> float | Counts:
        """The count that the loss of ``batch`` sums over: samples, tokens, or the sum of their weights.

        It is read from the batch on the host, before any forward.
        """

    def __call__(self, model: nn.Module, batch: Any) -> LossSum:
        """The loss of ``batch``, summed (not averaged) over its count: a 0-dim fp32 tensor."""


@runtime_checkable
class Scorer(Protocol):
    """A loss that reports further sums in an evaluation, such as the accuracy.

    It may state their names beforehand as ``score_names``, a tuple: a result of another name is refused before the run.
    """

    def scores(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """0-dim sums over the batch's count, by name, the loss or losses among them."""


def score_names(loss: Loss) -> tuple[str, ...] | None:
    """The names that ``loss`` says it scores by; None where it says nothing, or has other ``scores`` than their class.

    Without ``scores`` they are those of its counts.
    """
    kinds = type(loss).__mro__
    scoring, naming = (next((kind for kind in kinds if name in vars(kind)), None) for name in ("scores", "score_names"))
    if scoring is None or naming is None or not issubclass(naming, scoring):
        return None
    return tuple(getattr(loss, "score_names"))  # noqa: B009  no part of the interface


def scores(loss: Loss, model: nn.Module, batch: Any) -> Mapping[str, Tensor]:
    """The sums that ``loss`` reports for ``batch`` in an evaluation, by name.

    Raises:
        MisuseError: one of them is no 0-dim tensor.
    """
    found = as_loss_sums(loss.scores(model, batch) if isinstance(loss, Scorer) else loss(model, batch))
    for name, part in found.items():
        if part.ndim:
            problem = f"the score {name!r} has shape {list(part.shape)}, one number for each item"
            raise MisuseError(f"{problem}: one number is wanted, the sum over the batch's count")
    return found


@runtime_checkable
class Compilable(Protocol):
    """A loss a part of which may be compiled: what it makes of the model's output, as one of its methods or modules."""

    @property
    def to_compile(self) -> str:
        """The name of that attribute, called with tensors and never with the model; empty for none."""


@runtime_checkable
class Predictor(Protocol):
    """A loss that gives predictions to metrics, such as those of torchmetrics, in an evaluation."""

    def predictions(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """``(predictions, targets)`` of the items that count, in the shapes that the metrics take."""


def from_mean(mean: Tensor, count: float | Tensor) -> Tensor:
    """The sum of a loss that is a mean over ``count`` items; 0, not NaN, where it is a mean over none.

    The gradient is then 0 too for torch's own losses without weights of classes. A mean that you compute yourself must
    not divide by 0: clamp its divisor, or its backward gives NaN.

    Raises:
        MisuseError: the mean is no tensor, or the count no number that is at least 0.
    """
    if not isinstance(mean, Tensor):
        refuse_loss(mean)
    if isinstance(count, Tensor):
        count = count.reshape(()) if count.numel() == 1 else count
        return torch.where(count > 0, mean, torch.nan_to_num(mean)) * count
    count = as_counts(count)[SINGLE]
    return mean * count if count else torch.nan_to_num(mean) * 0.0
