"""Micro-batches in parts: cut between two samples, or not at all."""

from __future__ import annotations

from collections.abc import Iterator
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
    if isinstance(batch, list | tuple) and _has_one_each(batch, rows):
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


def _has_one_each(values: list[Any] | tuple[Any, ...], rows: int) -> bool:
    """Whether a list holds one value for each sample, and not fields that hold all samples each."""
    if len(values) != rows or hasattr(values, "_fields"):
        return False
    sizes = [set(_first_dimensions(value)) for value in values]
    return not all(found == {rows} for found in sizes)


def _first_dimensions(batch: Any) -> Iterator[int]:
    """Of every tensor and array in a batch; 0 for a single number."""
    found: list[int] = []
    map_tensors(
        batch,
        lambda tensor: found.append(int(tensor.shape[0]) if tensor.ndim else 0),
        lambda value: found.append(len(value) if value.ndim else 0) if isinstance(value, np.ndarray) else None,
    )
    yield from found
