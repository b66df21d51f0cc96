"""The longest micro-batch that data can make: what takes the most memory and time."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any, cast

import numpy as np
from torch.utils.data import DataLoader, default_collate

from distaccum.data.adapters import yields_batches
from distaccum.data.spec import DataSpec, is_map_style


def longest_micro_batch(data: DataSpec, size: int) -> Any:
    """A micro-batch of so many samples, on the host: the longest where the data says how long they are."""
    if not is_map_style(data.train):
        stream = iter(cast("Iterable[Any]", data.train))
        if yields_batches(data):
            return next(stream)
        return (data.collate or default_collate)(list(islice(stream, size)))
    ids = list(range(min(size, len(data.train))))
    if data.lengths is not None:
        ids = np.argsort(-np.asarray(data.lengths), kind="stable")[:size].tolist()
    loader = DataLoader(cast("Any", data.train), batch_sampler=[ids], collate_fn=data.collate)
    return next(iter(loader))
