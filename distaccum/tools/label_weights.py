"""Whether the weights of classes that a loss is given are computed of the micro-batch itself.

Those (``pos_weight = negatives / positives``) make each sample's loss depend on the others of its micro-batch. The
graph of a loss keeps them, with the labels: weights that differ exactly where the labels' shares do are computed of
these, and no weights of several tasks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distaccum.distributed.world import World
from distaccum.engines.ownership import nodes_of
from distaccum.losses.normalize import LossSum, as_loss_sums

_LOSSES = re.compile(r"\w*(Loss|BinaryCrossEntropy)\w*Backward\d")
_KINDS = ("weight", "pos_weight")
_MOST, _SHOWN = 64, 3  # losses of one micro-batch, and numbers that are compared; numbers in a message
_SAME = 1e-5


class _Given(NamedTuple):
    weights: Sequence[float]
    shares: Sequence[float]  # of the labels
    where: str = ""


class LabelWeights:
    """Of the losses of a window's micro-batches, in their order."""

    def __init__(self) -> None:
        self._noted: list[dict[str, _Given]] = []  # of each micro-batch; by kind of weights, loss and number

    def note(self, losses: LossSum) -> None:
        """Called with the losses of each micro-batch, before its backward; reads the device."""
        found = dict[str, _Given]()
        for loss in as_loss_sums(losses).values():
            with suppress(Exception):  # torch promises nothing of its nodes
                found |= _weights(nodes_of(loss), len(found))
        self._noted.append(found)

    def in_words(self, world: World) -> str:
        """Of two micro-batches that weigh their labels otherwise; empty where there are none. A collective."""
        known = dict[str, list[_Given]]()
        for rank, noted in enumerate(world.all_gather_object(self._noted)):
            for i, found in enumerate(noted):
                for kind, given in found.items():
                    known.setdefault(kind, []).append(given._replace(where=f"micro-batch {i} of rank {rank}"))
        for kind, every in known.items():
            one, others = every[0], every[1:]
            other = next((given for given in others if not _alike(given.weights, one.weights)), None)
            if other is not None and _computed(every):
                return (
                    f"{one.where} weighs its labels by {kind.partition(' ')[0]}={_shown(one.weights)}, {other.where} "
                    f"by {_shown(other.weights)}: computed of the micro-batch, they make the gradient depend on its "
                    "size. Compute them once, of the data set"
                )
        return ""


def _computed(every: Sequence[_Given]) -> bool:
    """Whether the same labels have the same weights, and other labels others."""
    pairs = [(one, other) for i, one in enumerate(every) for other in every[:i]]
    return all(_alike(one.weights, other.weights) == _alike(one.shares, other.shares) for one, other in pairs)


def _weights(nodes: Iterable[Any], number: int) -> dict[str, _Given]:
    found = dict[str, _Given]()
    for node in nodes:
        if len(found) >= _MOST or not _LOSSES.fullmatch(node.name()):
            continue
        shape = tuple(map(int, node.next_functions[0][0]._input_metadata[0].shape))
        for kind in _KINDS:
            weights, labels = _kept(node, kind), _kept(node, "target")
            if weights is not None and labels is not None and not _of_samples(weights, shape):
                given = _Given(_numbers(weights), _numbers(_shares(labels, shape)))
                found[f"{kind} {node.name()} {number + len(found)}"] = given
    return found


def _kept(node: Any, kind: str) -> Tensor | None:
    """None where there is none, or a hook has it, which may compute a forward again."""
    if getattr(getattr(node, f"_raw_saved_{kind}", None), "unpack_hook", None) is not None:
        return None
    kept = getattr(node, f"_saved_{kind}", None)
    return kept.detach() if isinstance(kept, Tensor) else None


def _of_samples(weights: Tensor, shape: tuple[int, ...]) -> bool:
    return weights.ndim == len(shape) and weights.shape[:1] == shape[:1]


def _shares(labels: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Of each class: of numbers of classes, or of numbers between 0 and 1."""
    if labels.is_floating_point():
        return labels.double().mean(0) if labels.ndim > 1 else labels.double().mean().reshape(1)
    own = labels.flatten()[labels.flatten() >= 0]  # but ignored ones
    return torch.bincount(own, minlength=shape[1] if len(shape) > 1 else 1).double() / max(1, len(own))


def _numbers(tensor: Tensor) -> list[float]:
    """All of it, or a sum and a norm of many."""
    numbers = tensor.double().flatten()
    return numbers.tolist() if len(numbers) <= _MOST else [float(numbers.cumsum(0).sum()), float(numbers.norm())]


def _alike(one: Sequence[float], other: Sequence[float]) -> bool:
    return len(one) == len(other) and all(
        abs(a - b) <= _SAME * max(abs(a), abs(b)) for a, b in zip(one, other, strict=True)
    )


def _shown(weights: Sequence[float]) -> str:
    return ", ".join(f"{weight:.4g}" for weight in weights[:_SHOWN]) + ", ..." * (len(weights) > _SHOWN)
