"""Summed cross entropy, and the number of labels in the sum."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distaccum.errors import ConfigError, MisuseError, kinds_of
from distaccum.losses.linear_cross_entropy import CHUNK, ChunkedOutput


def cross_entropy(logits: Tensor, labels: Tensor, *, ignore_index: int = -100) -> tuple[Tensor, Tensor]:
    """The summed cross entropy in nats (0-dim fp32), and its number of labels (0-dim int64, on their device).

    Args:
        logits: ``(*labels.shape, classes)``.
        labels: int64; those of value ``ignore_index`` neither contribute nor count.
    """
    _expect_logits(logits, labels)
    return _cross_entropy_sum(logits, labels, ignore_index), (labels != ignore_index).sum()


def count_labels(labels: Tensor, *, ignore_index: int = -100) -> int:
    """The number of labels that are not ignored, counted on the host; reads back labels that are on a device."""
    return int(np.count_nonzero(labels.cpu().numpy() != ignore_index))


def _expect_logits(logits: Any, labels: Tensor) -> None:
    if not isinstance(logits, Tensor):
        remedy = "return the logits alone, or use the loss of distaccum.losses.transformers that fits"
        raise MisuseError(f"the model returns a {type(logits).__name__}, and cross entropy takes logits: {remedy}")
    if logits.shape[:-1] != labels.shape and _long(logits.shape[:-1]) != _long(labels.shape):
        problem = f"logits of shape {list(logits.shape)} for labels of shape {list(labels.shape)}"
        remedy = "classes are the last dimension, as logits.movedim(1, -1) makes it; labels are the numbers of classes"
        raise MisuseError(f"{problem}: {remedy}")


def _cross_entropy_sum(logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    # At least fp32, whatever the forward's dtype: 16 bits are too few for a sum over thousands of tokens.
    flat = logits.flatten(0, -2)
    flat = flat if flat.dtype == torch.float64 else flat.float()
    return F.cross_entropy(flat, labels.flatten(), ignore_index=ignore_index, reduction="sum")


def _long(shape: torch.Size) -> list[int]:
    """The dimensions of more than one element."""
    return [size for size in shape if size != 1]


Batch = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]
"""Inputs and labels; of packed documents positions too."""


def _parts(batch: Batch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Inputs, labels, and what the model is given beside."""
    if not isinstance(batch, tuple | list) or len(batch) < 2:  # noqa: PLR2004  inputs and labels
        problem = f"cross entropy takes batches (inputs, labels), and the data gives {kinds_of(batch)}"
        raise MisuseError(f"{problem}: collate them so, or name the loss that takes these (docs/bring-your-own.md)")
    inputs, labels, *positions = batch
    return inputs, labels, {"position_ids": positions[0]} if positions else {}


class CrossEntropy:
    """Cross entropy in nats, for batches ``(inputs, labels)``.

    Rows of several documents come with their positions, as ``model(inputs, position_ids=...)`` takes them.

    ``model(inputs)`` returns logits of shape ``(*labels.shape, classes)``: ``(B, T, V)`` for tokens. With ``chunk`` the
    model makes the loss itself, inside its forward, and logits are never in memory as a whole: ``model(inputs,
    output=...)`` calls that in place of its output layer, and returns what it gives (see
    :class:`~distaccum.losses.linear_cross_entropy.ChunkedOutput`). ``predictions`` are whole logits all the same.

    Args:
        ignore_index: Labels with this value are ignored and not counted.
        chunk: Upper limit of the tokens whose logits are in memory at once, such as 1024. null: all.

    Raises:
        ConfigError: the chunk is no positive whole number.
    """

    score_names = ("loss", "accuracy")
    shifts_labels = False

    def __init__(self, *, ignore_index: int = -100, chunk: int | None = None) -> None:
        self.ignore_index = ignore_index
        self._chunk = checked_chunk(chunk)

    def check_model(self, model: nn.Module) -> None:
        """Refuses a model that cannot make the loss in chunks.

        Raises:
            ConfigError: its forward has no argument ``output``.
        """
        if self._chunk is not None and "output" not in inspect.signature(model.forward).parameters:
            problem = f"{type(model).__name__}.forward has no argument output, which would make the loss"
            remedy = "Leave the chunk out, or add output=F.linear to it: its last line is then"
            remedy += " return output(hidden, self.out.weight, self.out.bias)"
            raise ConfigError("loss.chunk", self._chunk, problem, remedy)

    def count(self, batch: Batch) -> int:
        """The number of labels that are not ignored."""
        return count_labels(_parts(batch)[1], ignore_index=self.ignore_index)

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        """The summed cross entropy, 0-dim fp32.

        Raises:
            MisuseError: the model gives no logits of the labels; or, in chunks, something else than ``output`` gave.
        """
        if self._chunk is not None:
            return self._in_chunks(model, batch, self._chunk, scores=False)
        inputs, labels, packed = _parts(batch)
        logits = model(inputs, **packed)
        _expect_logits(logits, labels)
        return self.of_logits(logits, labels)

    def of_logits(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The summed cross entropy of whole logits, in the shape of the labels."""
        return _cross_entropy_sum(logits, labels, self.ignore_index)

    @property
    def to_compile(self) -> str:
        """:meth:`of_logits`; in chunks nothing, as the loss is then made inside the model's forward."""
        return "of_logits" if self._chunk is None else ""

    def scores(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """The summed cross entropy as ``loss``, and the number of correct predictions as ``accuracy``."""
        if self._chunk is not None:
            loss, right = self._in_chunks(model, batch, self._chunk, scores=True)
            return {"loss": loss, "accuracy": right}
        inputs, labels, packed = _parts(batch)
        logits = model(inputs, **packed)
        _expect_logits(logits, labels)
        total = self.of_logits(logits, labels)
        return {"loss": total, "accuracy": (logits.argmax(-1) == labels.reshape(logits.shape[:-1])).sum()}

    def predictions(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Logits ``(n, classes)`` and labels ``(n,)`` of the labels that are not ignored."""
        inputs, labels, packed = _parts(batch)
        logits = model(inputs, **packed)
        labels = labels.reshape(logits.shape[:-1])
        counted = labels != self.ignore_index
        return logits[counted], labels[counted]

    def _in_chunks(self, model: nn.Module, batch: Batch, chunk: int, *, scores: bool) -> Tensor:
        inputs, labels, packed = _parts(batch)
        output = ChunkedOutput.of(labels, ignore_index=self.ignore_index, chunk=chunk, scores=scores)
        total: Any = model(inputs, output=output, **packed)
        wanted = (2,) if scores else ()
        if not isinstance(total, Tensor) or tuple(total.shape) != wanted:
            given = f"shape {list(total.shape)}" if isinstance(total, Tensor) else f"type {type(total).__name__}"
            problem = f"{type(model).__name__} was called with output=..., and its result has {given}"
            raise MisuseError(f"{problem}: return what output(hidden, weight, bias) gives, as it is")
        return total


def checked_chunk(chunk: Any) -> int | None:
    """The chunk of a loss.

    Raises:
        ConfigError: it is neither None nor a positive whole number.
    """
    if chunk is None or (isinstance(chunk, int) and not isinstance(chunk, bool) and chunk >= 1):
        return chunk
    raise ConfigError("loss.chunk", chunk, "no positive whole number", f"Give a number of tokens, such as {CHUNK}")
