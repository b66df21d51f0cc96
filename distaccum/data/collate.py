"""Collates samples of different lengths into padded batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from distaccum.errors import DataError


class PadCollator:
    """Collates samples, padding sequences at their end to the longest one of the micro-batch::

        PadCollator({"input_ids": 0, "attention_mask": 0, "labels": -100})  # samples are mappings
        PadCollator((0, -100))  # samples are tuples

    Fields are tensors, arrays or lists ``(T,)``, which become ``(B, T)``, and numbers, which are stacked to ``(B,)``
    and need no padding value.

    Args:
        values: the padding value of each field, by name or position; None: its sequences are all of one length, and
            are stacked.
    """

    def __init__(self, values: Mapping[str, float | None] | Sequence[float | None]) -> None:
        self._values = dict(values) if isinstance(values, Mapping) else dict(enumerate(values))

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
        try:
            return torch.stack(tensors) if value is None else pad_sequence(tensors, True, value)
        except (IndexError, RuntimeError) as error:
            raise DataError(f"field {name!r} of the samples cannot be put into one batch: {error}") from error
