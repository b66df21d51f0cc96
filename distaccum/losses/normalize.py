"""The one normaliser: divides sums of losses by the counts of the whole window."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf, log2
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from distaccum.errors import MisuseError

if TYPE_CHECKING:
    from typing_extensions import TypeIs

Counts = Mapping[str, float]
"""The count that each loss averages over, by name. A single loss has the name ``loss``."""
Count = Callable[[Any], float | Counts]
Logged = Mapping[str, tuple[Tensor | float, Tensor | float]]
"""What a loss logs and nothing optimizes: sums, each with its count, by name."""
LossSum = Tensor | Mapping[str, Tensor] | tuple[Tensor | Mapping[str, Tensor], Logged]

SINGLE = "loss"
_WIDE = (torch.float32, torch.float64)


class WatchedCounts(dict[str, float]):
    """A window's counts, which know whether somebody has read one, and what factors losses were normalized with."""

    def __init__(self, counts: Counts) -> None:
        super().__init__(counts)
        self.read = False
        self.factors: set[int] = set()
        self.means: Any = None
        """Is told each micro-batch's sums in a loop by hand, in its first window."""

    def __getitem__(self, name: str) -> float:
        self.read = True
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """As a dictionary's."""
        self.read = True
        return super().get(name, default)

    def values(self) -> Any:
        """As a dictionary's."""
        self.read = True
        return super().values()

    def items(self) -> Any:
        """As a dictionary's."""
        self.read = True
        return super().items()


def as_counts(count: float | Counts) -> Counts:
    """Counts by name; a bare number is the count of a single loss. NumPy's numbers and 0-dim tensors become Python's.

    Raises:
        MisuseError: a count is negative, NaN, infinite or not a number on the host; or there is none.
    """
    counts = count if isinstance(count, Mapping) else {SINGLE: count}
    if not counts:
        raise MisuseError("count() gives no count: give one number, or one for each loss by name")
    plain = True
    for name, value in counts.items():
        kind = type(value)
        if kind is not int and kind is not float:  # of a batch, which is on the host
            given: Any = value.item() if isinstance(value, np.ndarray | Tensor) and value.ndim == 0 else value
            if isinstance(given, bool) or not isinstance(given, Real) or not 0 <= float(given) < inf:
                raise MisuseError(_not_a_count(name, value))
            plain = False
        elif not 0 <= value < inf:
            raise MisuseError(_not_a_count(name, value))
    return counts if plain else {name: as_python(value) for name, value in counts.items()}


def as_python(value: Any) -> float:
    """A number of Python, NumPy or torch as Python's; reads one that is on a device."""
    number = value.item() if isinstance(value, np.ndarray | Tensor) else value
    return int(number) if isinstance(number, Integral) else float(number)


def _not_a_count(name: str, value: object) -> str:
    """The message for what is no count; in NumPy a truth value is no number either."""
    shown = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)[:80]
    given = "; None is what a function without return gives" if value is None else ""
    wanted = "give a finite number that is at least 0, read on the host, as in int((labels != -100).sum())"
    return f"the count of {name!r} is {shown}: {wanted}{given}"


def nearest_power_of_two(count: float) -> float:
    """The power of two nearest to a count; 1 for 0. Dividing by a power of two is exact; the step corrects it."""
    return 2.0 ** round(log2(count)) if count else 1.0


def as_loss_sums(loss: LossSum) -> Mapping[str, Tensor]:
    """Sums by name; a bare tensor is a single loss. What is only logged is left out.

    Raises:
        MisuseError: it is neither a tensor nor tensors by name.
    """
    if isinstance(loss, tuple) and _logs(loss):  # a call less in each micro-step
        loss = loss[0]
    if isinstance(loss, Tensor):
        return {SINGLE: loss}
    if isinstance(loss, Mapping) and loss and all(isinstance(part, Tensor) for part in loss.values()):
        return loss
    raise MisuseError(_not_a_loss(loss))


def logged_sums(loss: LossSum, device: torch.device) -> dict[str, Tensor]:
    """What a loss returns beside its sums, to be logged: by name a sum and its count, fp64 of shape ``(2,)``.

    Nothing is read from the device.

    Raises:
        MisuseError: it is no pair of numbers.
    """
    found = {}
    for name, pair in loss[1].items() if _logs(loss) else ():
        is_pair = isinstance(pair, tuple | list) and len(pair) == 2 and all(map(is_number, pair))  # noqa: PLR2004
        if not (isinstance(name, str) and is_pair):
            problem = f"the loss logs {name!r}: {pair!r:.80}, and a sum with its count is wanted"
            raise MisuseError(f"{problem}: return loss, {{'accuracy': (right.sum(), len(labels))}}")
        found[name] = torch.stack([_wide(one, device) for one in pair])
    return found


def is_number(value: object) -> bool:
    """Whether it is a real number of Python, NumPy or torch, perhaps as an array or tensor of one element."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, Real) or (isinstance(value, np.ndarray) and value.size == 1 and value.dtype.kind in "biuf")


def _wide(number: Any, device: torch.device) -> Tensor:
    if isinstance(number, Tensor):
        return number.detach().reshape(()).to(device, torch.float64)
    return torch.full((), float(number), dtype=torch.float64, device=device)  # a copy to it would wait for it


def _logs(loss: object) -> TypeIs[tuple[Tensor | Mapping[str, Tensor], Logged]]:
    return isinstance(loss, tuple) and len(loss) == 2 and isinstance(loss[1], Mapping)  # noqa: PLR2004


def refuse_loss(loss: object) -> NoReturn:
    """Raises MisuseError for what a loss returned in place of its sum: what it is, and what to return."""
    raise MisuseError(_not_a_loss(loss))


def _not_a_loss(loss: object) -> str:
    if loss is None:
        return "the loss is None: return its sum, a 0-dim tensor"
    if isinstance(getattr(loss, "loss", None), Tensor):
        what = f"the loss is a {type(loss).__name__}, the model's whole output"
        return f"{what}: return the sum of a loss of its logits, or use a mean with its count, out.loss * count"
    if isinstance(loss, tuple | list):
        what = f"the loss is a {type(loss).__name__} of {len(loss)}"
        beside = "or, with numbers to log, loss, {'name': (sum, count)}"
        return f"{what}: return the sum alone, a 0-dim tensor (its count is given apart), or several by name; {beside}"
    if isinstance(loss, Mapping):
        others = [f"{name!r}: {type(part).__name__}" for name, part in loss.items() if not isinstance(part, Tensor)]
        return f"the losses by name are {{{', '.join(others)}}}: return a 0-dim tensor for each"
    if hasattr(loss, "represent"):
        what = f"{type(loss).__name__} compares the samples of a whole window, and no micro-batch has its loss"
        return f"{what}: call acc.step(window, loss), which runs the window"
    remedy = "return the sum as a 0-dim tensor that was computed from the model's output, without .item() or float()"
    return f"the loss is {loss!r:.80}, a {type(loss).__name__}, which has no gradient: {remedy}"


def normalize_loss(
    loss: LossSum, counts: Counts, gradient_divide_factor: int, *, own_counts: Counts | None = None
) -> Tensor:
    """The tensor that one micro-step backpropagates: ``loss * gradient_divide_factor / count``, added over the losses.

    Its gradients, summed over the micro-batches of all ranks and divided by ``gradient_divide_factor`` in the engine's
    reduction, are the gradient of each loss's mean over the window.

    Args:
        loss: the micro-batch's loss, summed over its items: 0-dim; or one for each of several losses, by name.
        counts: the counts of the whole window, over all ranks. A loss with a count of 0 adds nothing.
        gradient_divide_factor: what the engine divides the summed gradient by: 1 where it only sums.
        own_counts: the micro-batch's, if they are known: where it counts nothing, its loss may be a constant.

    Returns:
        0-dim.

    Raises:
        MisuseError: it is no sum: another type, not 0-dim, not of fp32 or fp64, or cut off from the model's parameters;
            or losses and counts have different names.
    """
    sums = as_loss_sums(loss)
    if isinstance(counts, WatchedCounts):
        counts.factors.add(gradient_divide_factor)
        if counts.means is not None:
            counts.means.note(sums)
    if sums.keys() != counts.keys():
        if isinstance(getattr(loss, "loss", None), Tensor):
            refuse_loss(loss)
        problem = f"the losses are {sorted(sums)}, and what was counted is {sorted(counts)}: use the same names"
        raise MisuseError(problem)
    for name, part in sums.items():
        if part.dtype not in _WIDE or part.ndim:
            raise MisuseError(_not_a_sum(name, part))
    weighed = [part * (gradient_divide_factor / counts[name] if counts[name] else 0.0) for name, part in sums.items()]
    result = weighed[0]
    for part in weighed[1:]:
        result = result + part
    if not result.requires_grad and (own_counts is None or any(own_counts.values())):
        problem = f"the loss has no gradient ({', '.join(sums)}): it does not depend on a parameter that is trained"
        cut = ".detach(), .item(), torch.tensor(...) and torch.no_grad() cut it off"
        raise MisuseError(f"{problem}. Compute it from the output of the model that the loss is given; {cut}")
    return result


def _not_a_sum(name: str, part: Tensor) -> str:
    if part.ndim:
        remedy = "one number is wanted: return its sum, as in loss.sum(), or with reduction='sum'"
        return f"the loss {name!r} has shape {list(part.shape)}, one number for each item: {remedy}"
    if part.dtype in (torch.float16, torch.bfloat16):
        problem = f"the total of {name!r} is {part.dtype}, which rounds a sum and, in fp16, overflows"
        return f"{problem}: convert before summing, as in x.float().sum()"
    return f"the loss {name!r} is {part.dtype}, which has no gradient: return a sum in fp32 or fp64"
