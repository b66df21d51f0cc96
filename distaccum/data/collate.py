"""Collates samples of different lengths into padded batches, and fills batches up to a number of rows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import default_collate

from distaccum.config.checks import require, require_count
from distaccum.data.agreement import parts
from distaccum.data.spec import Ignored
from distaccum.errors import DataError


def none_among(samples: Iterable[Any], numbers: Iterable[int], collate: object) -> DataError | None:
    """What is wrong with the first of ``samples`` that torch's ``default_collate`` cannot batch for a None in it.

    ``numbers`` are theirs in the data. None where there is no such sample, or ``collate`` is another function.
    """
    for number, sample in zip(numbers, samples, strict=False) if collate in (None, default_collate) else ():
        if (path := _path_of_none(sample)) is not None:
            remedy = "leave that field out, or collate it by a function of your own (DataSpec.collate)"
            if not path:
                remedy = "give DataSpec.collate a function that drops it, and returns None where no sample is left"
            return DataError(f"sample {number}{path} is None, which torch's default_collate cannot batch: {remedy}")
    return None


def _path_of_none(item: Any) -> str | None:
    if item is None:
        return ""
    found = ((name, _path_of_none(value)) for name, value in parts(item))
    return next((name + path for name, path in found if path is not None), None)


class PadCollator:
    """Collates samples, padding sequences at their end to the longest one of the micro-batch::

        PadCollator({"input_ids": 0, "attention_mask": 0, "labels": -100})  # samples are mappings
        PadCollator((0, -100))  # samples are tuples
        PadCollator((0, -100), pad_to_multiple_of=64)  # few lengths, so that compiled code sees few shapes
        PadCollator((0, -100), pad_to=1024)  # one length

    Fields are tensors, arrays or lists ``(T,)``, which become ``(B, T)``, and numbers, which are stacked to ``(B,)``
    and need no padding value.

    Args:
        values: the padding value of each field, by name or position; None: its sequences are all of one length, and
            are stacked.
        pad_to: the length of every micro-batch, at least that of the longest sample; None: its own longest.
        pad_to_multiple_of: instead, rounds the longest of a micro-batch up to a multiple of this.

    Raises:
        ConfigError: a length below 1, or both of them.
    """

    def __init__(
        self,
        values: Mapping[str, float | None] | Sequence[float | None],
        *,
        pad_to: int | None = None,
        pad_to_multiple_of: int | None = None,
    ) -> None:
        self._values = dict(values) if isinstance(values, Mapping) else dict(enumerate(values))
        check_lengths(pad_to, pad_to_multiple_of)
        self._pad_to, self._multiple = pad_to, pad_to_multiple_of

    @property
    def bare(self) -> PadCollator | None:
        """The same that pads to the longest and no more; None where this one does not either."""
        if self._pad_to is None and self._multiple is None:
            return None
        found = copy.copy(self)
        found._pad_to = found._multiple = None
        return found

    def padded_length(self, longest: int) -> int:
        """The length of a micro-batch whose longest sample has ``longest``."""
        if self._pad_to is not None:
            return self._pad_to
        return longest if self._multiple is None else -(-longest // self._multiple) * self._multiple

    def tokens_of(self, lengths: NDArray[np.int64]) -> int:
        """The tokens of a micro-batch of samples of these lengths, padding included."""
        return self.padded_length(int(lengths.max())) * len(lengths)

    def __call__(self, samples: Sequence[Any]) -> Any:
        """The batch: a dict for mappings, a tuple for tuples.

        Raises:
            DataError: a field holds no numbers, has sequences without a padding value, or mixes lengths or kinds that
                cannot be put into one batch.
        """
        first = samples[0]
        if isinstance(first, Mapping):
            return {name: self._collate(name, [sample[name] for sample in samples]) for name in first}
        if isinstance(first, tuple):
            return tuple(self._collate(place, list(field)) for place, field in enumerate(zip(*samples, strict=True)))
        raise DataError(f"PadCollator takes samples that are mappings or tuples, and these are {type(first).__name__}")

    def _collate(self, name: Any, field: list[Any]) -> Tensor:
        try:
            # torch.tensor copies: as_tensor would share a read-only array, and warn of it
            tensors = [value if isinstance(value, Tensor) else torch.tensor(value) for value in field]
        except (TypeError, ValueError, RuntimeError) as error:
            raise DataError(f"field {name!r} of the samples cannot be made a tensor: {error}") from error
        # An empty list has no dtype, and a list of whole numbers may stand for floats.
        types = [tensor.dtype for tensor in tensors if tensor.numel()] or [tensors[0].dtype]
        common = reduce(torch.promote_types, types)
        tensors = [tensor.to(common) for tensor in tensors]
        if all(tensor.dim() == 0 for tensor in tensors):
            return torch.stack(tensors)
        if name not in self._values:
            known = ", ".join(map(repr, self._values)) or "none"
            problem = f"field {name!r} of the samples is a sequence, and no padding value is stated for it"
            raise DataError(f"{problem}; fields with one: {known}")
        value = self._values[name]
        if value is not None and not _holds(common, value):
            problem = f"field {name!r} of the samples is {common}, which cannot hold the padding value {value}"
            raise DataError(f"{problem}: give it as int64, as labels are")
        try:
            if value is None:
                return torch.stack(tensors)
            batch = pad_sequence(tensors, True, value)
        except (IndexError, RuntimeError) as error:
            raise DataError(f"field {name!r} of the samples cannot be put into one batch: {error}") from error
        longest = batch.shape[1]
        length = self.padded_length(longest)
        if length < longest:
            raise DataError(f"field {name!r} of a sample has the length {longest}, and pad_to={length}: raise it")
        if length == longest:
            return batch
        padded = batch.new_full((len(batch), length, *batch.shape[2:]), value)
        padded[:, :longest] = batch
        return padded


def check_lengths(pad_to: int | None, pad_to_multiple_of: int | None, *, key: str = "") -> None:
    """Raises ConfigError where a length is below 1, or both are given; ``key`` stands before their names."""
    for name, value in (("pad_to", pad_to), ("pad_to_multiple_of", pad_to_multiple_of)):
        whole = value is None or (isinstance(value, int) and not isinstance(value, bool))
        require(whole, f"{key}{name}", value, "is no whole number", "Give a number of tokens, such as 64")
        require_count(f"{key}{name}", value, least=1)
    both = pad_to is not None and pad_to_multiple_of is not None
    require(not both, f"{key}pad_to", pad_to, f"and {key}pad_to_multiple_of={pad_to_multiple_of} too", "State one")


class FilledCollator:
    """Collates samples into batches of ``rows`` rows: the rest are copies of the first sample that count nothing.

    A copy gives a forward nothing to stumble over, as a row without a single real token may. Its loss and its gradient
    are 0, since its labels are ignored.

    Args:
        collate: from samples to a batch, a mapping or a tuple; None for torch's ``default_collate``.
        rows: of every batch; one of more samples is left as it is.
        ignored: the parts of a batch, by name or position, that make a row count nothing, and their value there.
    """

    def __init__(self, collate: Callable[[list[Any]], Any] | None, rows: int, ignored: Ignored) -> None:
        self._collate, self.rows, self._ignored = collate or default_collate, rows, dict(ignored)

    @property
    def bare(self) -> Callable[[list[Any]], Any]:
        """What collates samples without rows or lengths that none of them has."""
        return getattr(self._collate, "bare", None) or self._collate

    def __call__(self, samples: list[Any]) -> Any:
        """The batch.

        Raises:
            DataError: a part that is to be ignored is not there, or is no tensor of a row for each sample.
        """
        missing = self.rows - len(samples)
        if missing <= 0:
            return self._collate(samples)
        # Collations may change what they are given.
        batch = self._collate([*samples, *(copy.deepcopy(samples[0]) for _ in range(missing))])
        for name, value in self._ignored.items():
            part = _part(batch, name)
            if not isinstance(part, Tensor) or not part.ndim or len(part) != self.rows:
                is_it = f"shape {list(part.shape)}" if isinstance(part, Tensor) else f"type {type(part).__name__}"
                problem = f"the part {name!r} of a batch of {self.rows} rows has {is_it}, no row for each of them"
                raise DataError(f"{problem}: its {_WHERE}")
            if not _holds(part.dtype, value):
                problem = f"the part {name!r} of a batch is {part.dtype}, which cannot hold {value:g}"
                raise DataError(f"{problem}, with which rows are to be ignored: give it as int64, as labels are")
            part[len(samples) :] = value
        return batch


def _part(batch: Any, name: Any) -> Any:
    try:
        return batch[name]
    except (KeyError, IndexError, TypeError) as error:
        if isinstance(name, str) and hasattr(batch, name):  # of a dataclass or a named tuple
            return getattr(batch, name)
        raise DataError(f"a batch of {type(batch).__name__} has no part {name!r}, whose {_WHERE}") from error


def _holds(dtype: torch.dtype, value: float) -> bool:
    """Whether a number fits: integers would wrap it around, and -100 in ``uint8`` is the class 156."""
    if dtype.is_floating_point or dtype.is_complex:
        return True
    if dtype is torch.bool:
        return value in (0, 1)
    limits = torch.iinfo(dtype)
    return limits.min <= value <= limits.max and int(value) == value


_WHERE = "rows are to be ignored (DataSpec.ignored): name the parts that the loss counts, or leave pad_rows out"
