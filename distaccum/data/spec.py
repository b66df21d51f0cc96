"""What a data source gives the trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

import numpy as np
from numpy.typing import NDArray


class MapDataset(Protocol):
    """A map-style dataset: any object with a length and samples by index, as ``torch.utils.data`` knows them."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def _no_baselines() -> Mapping[str, float]:
    return {}


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """Training and held-out samples, and how to read the numbers made from them.

    Args:
        train: the training samples, by index; or a stream: an iterable of this rank's samples, iterated once an epoch,
            or of its micro-batches if it is a ``DataLoader`` over one.
        eval_dataset: samples that are never trained on; None where there are none.
        description: one line for the start of the run.
        collate: from a list of samples to a batch; None for torch's ``default_collate``.
        lengths: of each training sample in tokens, for budgets of tokens and for grouping; None where not known.
        shuffle: the training samples, anew every epoch; False for the dataset's own order.
        micro_batch_size: of the micro-batches, where the data say it: the run must say the same.
        bytes_per_token: for text, to report bits per byte; None where the loss has no such reading.
        baselines: held-out bits per byte of simple models, by name; computed when first asked for.
    """

    train: MapDataset | Iterable[Any]
    eval_dataset: MapDataset | None
    description: str
    collate: Callable[[list[Any]], Any] | None = None
    lengths: NDArray[np.int64] | None = None
    shuffle: bool = True
    micro_batch_size: int | None = None
    bytes_per_token: float | None = None
    baselines: Callable[[], Mapping[str, float]] = _no_baselines


def is_map_style(data: Any) -> TypeGuard[MapDataset]:
    """Whether samples can be had by index."""
    return hasattr(data, "__getitem__") and hasattr(data, "__len__")
