"""The longest micro-batch that data can make: what takes the most memory and time."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any, cast

import numpy as np
from torch.utils.data import default_collate

from distaccum.data.adapters import yields_batches
from distaccum.data.collate import none_among
from distaccum.data.spec import DataSpec, is_map_style
from distaccum.errors import DataError


def longest_micro_batch(data: DataSpec, size: int) -> Any:
    """A micro-batch of so many samples, on the host: the longest where the data says how long they are.

    Samples that are None are left out.

    Raises:
        DataError: all are None, or the collate function makes no batch of those that are there.
    """
    if not is_map_style(data.train):
        stream = iter(cast("Iterable[Any]", data.train))
        if yields_batches(data):
            return next(stream)
        return (data.collate or default_collate)(list(islice(stream, size)))
    order = range(len(data.train)) if data.lengths is None else np.argsort(-np.asarray(data.lengths), kind="stable")
    read = ((i, data.train[i]) for i in map(int, order))
    found = dict(islice(((i, sample) for i, sample in read if sample is not None), size))
    if problem := none_among(found.values(), found, data.collate):
        raise problem
    if not found:
        raise DataError("every sample is None: there is nothing to train on")
    batch = (data.collate or default_collate)(list(found.values()))
    if batch is None:
        raise DataError("the collate function gave None for samples that are there: let it return the batch it made")
    return batch
