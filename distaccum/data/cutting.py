"""Micro-batches in parts: cut between two samples, or not at all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

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
        sizes = sorted(set(_first_dimensions(batch)))
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


def shape_of(batch: Any) -> tuple[int, int]:
    """The rows of a batch's largest tensor, and the elements of each: of tokens the padded length."""
    kind = type(batch)
    parts = batch.values() if kind is dict else batch if kind is tuple or kind is list else None
    rows = most = 0
    for part in parts or ():  # no call of ours a part: it is asked for every micro-batch
        if not isinstance(part, Tensor):
            parts = None
            break
        if part.ndim and part.numel() > most:
            rows, most = part.shape[0], part.numel()
    if parts is None:
        tensors: list[Tensor] = []
        map_tensors(batch, tensors.append)
        largest = max((t for t in tensors if t.ndim), key=Tensor.numel, default=None)
        rows, most = (0, 0) if largest is None else (largest.shape[0], largest.numel())
    return rows, most // rows if rows else 0


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


def _first_dimensions(batch: Any) -> Iterator[int]:
    """Of every tensor and array in a batch; 0 for a single number."""
    found: list[int] = []
    map_tensors(
        batch,
        lambda tensor: found.append(int(tensor.shape[0]) if tensor.ndim else 0),
        lambda value: found.append(len(value) if value.ndim else 0) if isinstance(value, np.ndarray) else None,
    )
    yield from found
