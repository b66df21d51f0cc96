"""The description of a dataset: training and evaluation samples, and how to batch and read them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

import numpy as np
from numpy.typing import NDArray


class MapDataset(Protocol):
    """A map-style dataset as in ``torch.utils.data``: any object with a length and samples by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """Training and evaluation samples, and how to batch and read them.

    Args:
        train: the training samples, by index; or a stream: an iterable of this rank's samples, iterated once per epoch,
            or of its micro-batches if it is a ``DataLoader`` over an iterable dataset.
        eval_dataset: samples that are never trained on; None where there are none.
        description: one line for the start of the run.
        collate: from a list of samples to a batch; None for torch's ``default_collate``.
        lengths: tokens of each training sample, for token budgets and for grouping; None where not known.
        shuffle: whether to shuffle the training samples every epoch; False keeps the dataset's own order.
        micro_batch_size: of the micro-batches, where the data fix it: the run must state the same.
        bytes_per_token: for text, to report bits per byte; None where the loss cannot be read so.
        baselines: computes the bits per byte of simple models on the evaluation samples, by name.
    """

    train: MapDataset | Iterable[Any]
    eval_dataset: MapDataset | None
    description: str
    collate: Callable[[list[Any]], Any] | None = None
    lengths: NDArray[np.int64] | None = None
    shuffle: bool = True
    micro_batch_size: int | None = None
    bytes_per_token: float | None = None
    baselines: Callable[[], Mapping[str, float]] = dict


def is_map_style(data: Any) -> TypeGuard[MapDataset]:
    """Whether ``data`` has a length and samples by index."""
    return hasattr(data, "__getitem__") and hasattr(data, "__len__")
