"""The interface of losses: a sum and its count. The mean is taken once, over the whole global batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from distaccum.errors import MisuseError
from distaccum.losses.normalize import SINGLE, Counts, LossSum, as_counts, as_loss_sums, refuse_loss

if TYPE_CHECKING:
    from typing_extensions import TypeIs


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
        """The loss of ``batch``, summed (not averaged) over its count: a 0-dim fp32 tensor.

        With ``return loss, {"accuracy": (right, labels)}`` the Trainer's records have ``accuracy`` too, which nothing
        optimizes: the sums over all ranks of the record's window, divided; left out where the count is 0. Either may be
        a number or a 0-dim tensor, which is read when the record is made.
        """


class WindowLoss(Protocol):
    """A loss that compares samples with each other, as a contrastive one: over all samples of a window, on all ranks.

    It is told by its ``represent``, and called once per window::

        def count(self, batch): return len(batch["image"])
        def represent(self, model, batch): return model(batch)  # (B, D), normalised
        def __call__(self, representations): return ...  # of (samples of the window, D)

    The gradient is that of one forward of the whole window: every micro-batch is represented twice, first without
    gradients for all representations, then with its own part of the gradient. Source: L. Gao et al., "Scaling Deep
    Contrastive Learning Batch Size under Memory Limited Setup" (2021).

    What it learns besides, such as a temperature, belongs to the model and into ``represent``, which multiplies the
    representations by it: ``__call__`` may depend on learned numbers by way of the representations alone.

    In an evaluation it is called once with all of a held-out set. With ``scores(representations)`` beside, that gives
    0-dim sums by name, the loss or losses among them.
    """

    def count(self, batch: Any) -> float | Counts:
        """The count that ``batch`` adds to the window's: samples, tokens, or the sum of their weights."""

    def represent(self, model: nn.Module, batch: Any) -> Any:
        """A tensor, or tensors in dicts, lists and tuples, each with a leading dimension of any length.

        The same again where it is called a second time with the same random numbers of torch, NumPy and Python.
        """

    def __call__(self, representations: Any) -> LossSum:
        """The loss of the window, summed over its count: a 0-dim fp32 tensor, or several by name.

        Args:
            representations: as ``represent`` gives them, those of the window's micro-batches one after the other along
                the leading dimension, in the plan's order: rank after rank, in fp32 where they are in 16 bits. The same
                on every rank, which all compute the same. What is drawn from torch's generators is the same as well.
        """


AnyLoss = Loss | WindowLoss


def is_window_loss(loss: object) -> TypeIs[WindowLoss]:
    """Whether a loss is called once per window, with representations."""
    return hasattr(loss, "represent")


@runtime_checkable
class InOrder(Protocol):
    """A loss that has to know which of the window's micro-batches it is called for, as that of a second pass."""

    @property
    def fault(self) -> str:
        """In words, why the window's gradient is not what it was to be; empty as far as this rank knows."""

    def begin(self, i: int) -> None:
        """The next call is for the ``i``-th micro-batch."""


@runtime_checkable
class Scorer(Protocol):
    """A loss that reports further sums in an evaluation, such as the accuracy.

    It may state their names beforehand as ``score_names``, a tuple: a result of another name is refused before the run.
    """

    def scores(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """0-dim sums over the batch's count, by name, the loss or losses among them."""


def score_names(loss: AnyLoss) -> tuple[str, ...] | None:
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
    return _expect_sums(loss.scores(model, batch) if isinstance(loss, Scorer) else loss(model, batch))


def window_scores(loss: WindowLoss, representations: Any) -> Mapping[str, Tensor]:
    """As :func:`scores`, of all representations of a held-out set."""
    own: Any = getattr(loss, "scores", loss)
    return _expect_sums(own(representations))


def _expect_sums(given: Any) -> Mapping[str, Tensor]:
    found = as_loss_sums(given)
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


def from_mean(mean: LossSum, count: float | Tensor) -> Tensor:
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
