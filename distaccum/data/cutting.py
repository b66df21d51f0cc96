"""Micro-batches in parts: cut between two samples, or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from distaccum.data.batches import map_tensors, rebuilder
from distaccum.data.window import Window


class CannotCutError(Exception):
    """A micro-batch of which nobody can say where a sample ends; says why, in words."""


def rows_of(window: Window, i: int) -> int:
    """The rows that micro-batch ``i`` can be cut between: its samples, or rows of packed documents.

    Raises:
        CannotCutError: the batch or its loader does not say.
    """
    batch = window.micro_batches[i].batch
    if window.rows is None:
        raise CannotCutError("its loader does not say how many samples it has")
    rows = window.rows(i)
    if rows is None:
        found: list[Any] = []
        map_tensors(batch, found.append, lambda value: found.append(value) if isinstance(value, np.ndarray) else None)
        sizes = sorted({value.shape[0] if value.ndim else 0 for value in found})
        if len(sizes) != 1:
            raise CannotCutError(f"its tensors have the first dimensions {sizes}")
        (rows,) = sizes
    cut(batch, 0, rows, rows)  # looks at every part
    return rows


def cut(batch: Any, start: int, stop: int, rows: int) -> Any:
    """The rows from ``start`` to ``stop`` of a batch that has so many ``rows``, in containers of the same types.

    Tensors, arrays and lists of one value a sample are cut. Text, truth values and None are the same in every part.

    Raises:
        CannotCutError: a part of the batch is none of these.
    """
    if isinstance(batch, Tensor | np.ndarray):
        if batch.ndim and batch.shape[0] == rows:
            return batch[start:stop]
        raise CannotCutError(f"it has {rows} samples, and a tensor of shape {list(batch.shape)}")
    if batch is None or isinstance(batch, str | bytes | bool):
        return batch
    if (
        isinstance(batch, list | tuple)
        and len(batch) == rows
        and not hasattr(batch, "_fields")
        and _has_one_each(batch)
    ):
        return batch[start:stop]
    rebuild = None if isinstance(batch, PackedSequence) else rebuilder(batch)
    if rebuild is None:
        raise CannotCutError(f"it has a part of type {type(batch).__name__}, which may be of all samples")
    return rebuild(batch, lambda part: cut(part, start, stop, rows))


class Shape(NamedTuple):
    """Of a micro-batch: its rows, and the elements of each; of token data the padded length."""

    rows: int
    elements: int

    def fits_in(self, other: Shape) -> bool:
        """Whether it is no larger in either direction, so that it takes no more memory."""
        return self.rows <= other.rows and self.elements <= other.elements

    def __str__(self) -> str:
        return f"{self.rows} x {self.elements}"


def shape_of(batch: Any) -> Shape:
    """The rows of a batch's largest tensor, and the elements of each."""
    tensors: list[Tensor] = []
    kind = type(batch)
    parts = batch.values() if kind is dict else batch if kind is tuple or kind is list else (batch,)
    for part in parts:  # no call of ours a part: it is asked for every micro-batch
        if isinstance(part, Tensor):
            tensors.append(part)
        else:
            map_tensors(part, tensors.append)
    rows = most = 0
    for tensor in tensors:
        if tensor.ndim and tensor.numel() > most:
            rows, most = tensor.shape[0], tensor.numel()
    return Shape(rows, most // rows if rows else 0)


def _has_one_each(values: list[Any] | tuple[Any, ...]) -> bool:
    """Whether a list of as many values as samples holds one of each, and not fields that hold all samples each.

    Raises:
        CannotCutError: it may be either.
    """
    rows = len(values)
    if not any(isinstance(value, Tensor | np.ndarray | Mapping | list | tuple) for value in values):
        return True  # text and numbers
    try:
        for value in values:
            cut(value, 0, rows, rows)
    except CannotCutError:
        return True
    if rows > 1 and all(_kind(value) == _kind(values[0]) for value in values):
        raise CannotCutError(f"it has {rows} samples, and a {type(values).__name__} of {rows} parts that are alike")
    return False


def _kind(value: Any) -> Any:
    """What samples of one field have alike, whatever their lengths."""
    if isinstance(value, Tensor | np.ndarray):
        return type(value), value.dtype, value.shape[1:]
    if isinstance(value, Mapping):
        return type(value), tuple((key, _kind(part)) for key, part in value.items())
    return type(value)
