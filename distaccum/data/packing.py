"""Packs documents into rows without padding between them; each stays a document of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distaccum.data.collate import PadCollator
from distaccum.data.spec import DataSpec, is_map_style
from distaccum.errors import ConfigError, DataError

IGNORED = -100
_IDS, _MASK, _LABELS, _POSITIONS = "input_ids", "attention_mask", "labels", "position_ids"


def rows_of(lengths: Sequence[int] | NDArray[np.int64], row: int) -> list[list[int]]:
    """Which documents lie in which row, by their numbers: the longest first, each into the first row with room.

    First-fit decreasing: D. S. Johnson, "Near-optimal bin packing algorithms" (1973); at most 11/9 of the fewest rows.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for i in np.argsort(-np.asarray(lengths), kind="stable").tolist():
        length = int(lengths[i])
        place = next((place for place, left in enumerate(room) if left >= length), len(rows))
        if place == len(rows):
            rows.append([])
            room.append(row)
        rows[place].append(i)
        room[place] -= length
    return rows


class PackCollator:
    """Collates a micro-batch's documents into rows of at most ``row`` tokens, or of one longer held-out document.

    Positions begin at 0 with each document, which is how a model tells them apart. The rest of a row is a document
    whose labels are ignored.

    Args:
        bare: pads the same samples, one a row: it has the padding values.
        row: tokens of a row, at least those of the longest document.
        shifted: whether the loss shifts labels itself: the first of each document then is ignored, as it would be
            predicted from the document before.
    """

    def __init__(self, bare: PadCollator, row: int, *, shifted: bool) -> None:
        self.bare, self.row, self._shifted = bare, row, shifted

    def __call__(self, samples: Sequence[Any]) -> Any:
        """For tuples ``(inputs, labels)``: ``(inputs, labels, positions)``, each ``(rows, T)``. For mappings with
        ``input_ids`` and ``labels``: these with ``position_ids``, and without the ``attention_mask``.

        Raises:
            DataError: a sample has other parts.
        """
        documents = [parts(sample) for sample in samples]
        lengths = [len(ids) for ids, _ in documents]
        rows = rows_of(lengths, max(self.row, *lengths))
        longest = max(sum(lengths[i] for i in row) for row in rows)
        shape = len(rows), longest
        ids, positions = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
        labels = torch.full(shape, IGNORED, dtype=torch.int64)
        for place, row in enumerate(rows):
            begin = 0
            for i in row:
                end = begin + lengths[i]
                ids[place, begin:end], labels[place, begin:end] = documents[i]
                positions[place, begin:end] = torch.arange(lengths[i])
                if self._shifted:
                    labels[place, begin] = IGNORED
                begin = end
            positions[place, begin:] = torch.arange(longest - begin) % max(lengths)  # no model is made for more
        if isinstance(samples[0], Mapping):
            return {_IDS: ids, _LABELS: labels, _POSITIONS: positions}
        return ids, labels, positions

    def tokens_of(self, lengths: NDArray[np.int64]) -> int:
        """The tokens of a micro-batch of documents of these lengths, padding included."""
        rows = rows_of(lengths, self.row)
        return len(rows) * max(int(lengths[row].sum()) for row in rows)


def packed(data: DataSpec, *, row_tokens: int | None, shifted: bool) -> DataSpec:
    """The same data, a micro-batch's documents packed into rows.

    Args:
        data: of documents, with their lengths and a :class:`PadCollator`.
        row_tokens: of a row; None: as many as the longest document has.
        shifted: see :class:`PackCollator`.

    Raises:
        ConfigError: the data cannot be packed, or a document is longer than a row.
    """
    key, named = "batch.packing", "documents"
    if not is_map_style(data.train):
        problem = "the data is a stream, whose documents are not known beforehand"
        raise ConfigError(key, named, problem, "Leave it out, or give samples by index")
    if data.lengths is None or not len(data.lengths):
        problem = "the data does not say how long its samples are"
        raise ConfigError(key, named, problem, "Give lengths to its DataSpec: the tokens of each training sample")
    if not isinstance(data.collate, PadCollator):
        problem = "the data has a collation of its own, and documents are packed in its place"
        raise ConfigError(key, named, problem, "Give its DataSpec a PadCollator, or leave it out")
    if data.collate.bare is not None or data.pad_rows:
        problem = "micro-batches are padded to fixed lengths or rows too"
        raise ConfigError(key, named, problem, "Leave data.pad_to, data.pad_to_multiple_of and batch.pad_rows out")
    longest = int(data.lengths.max())
    if row_tokens is not None and row_tokens < longest:
        problem = f"and the longest document has {longest} tokens"
        raise ConfigError("batch.row_tokens", row_tokens, problem, f"Give at least {longest}, or cut the documents")
    collate = PackCollator(data.collate, row_tokens or longest, shifted=shifted)
    return replace(data, collate=collate)


def parts(sample: Any) -> tuple[Tensor, Tensor]:
    """Inputs and labels of a sample, of one length.

    Raises:
        DataError: it has others.
    """
    if isinstance(sample, Mapping):
        known = sample.keys() >= {_IDS, _LABELS} and sample.keys() <= {_IDS, _LABELS, _MASK}
        masked = _MASK in sample and not bool(torch.as_tensor(sample[_MASK]).all())
        said = "a mask with zeros" if known and masked else f"the parts {', '.join(map(str, sample))}"
        fits, given = known and not masked, (sample.get(_IDS), sample.get(_LABELS))
    else:
        fits = isinstance(sample, tuple) and len(sample) == 2  # noqa: PLR2004  inputs and labels
        said, given = f"the type {type(sample).__name__}", tuple(sample) if fits else ()
    if fits:
        ids, labels = (part if isinstance(part, Tensor) else torch.tensor(part) for part in given)
        if ids.ndim == 1 and ids.shape == labels.shape:
            return ids, labels
        said = f"inputs of shape {list(ids.shape)} and labels of shape {list(labels.shape)}"
    problem = f"batch.packing=documents packs samples of inputs and labels, and one has {said}"
    raise DataError(f"{problem}: give (inputs, labels), or input_ids and labels, of one length")
