"""What a data source gives the trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard, cast

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader


class MapDataset(Protocol):
    """A map-style dataset: any object with a length and samples by index, as ``torch.utils.data`` knows them."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def _no_baselines() -> Mapping[str, float]:
    return {}


@dataclass(frozen=True, kw_only=True)
class Source:
    """Training and held-out samples, and how to read the numbers made from them.

    Args:
        train: the training samples, by index; or a stream: an iterable of this rank's samples, iterated once an epoch,
            or of its micro-batches if it is a ``DataLoader``.
        held_out: samples that are never trained on; None where there are none.
        description: one line for the start of the run.
        collate: from a list of samples to a batch; None for torch's ``default_collate``.
        lengths: of each training sample in tokens, for budgets of tokens and for grouping; None where not known.
        bytes_per_token: for text, to report bits per byte; None where the loss has no such reading.
        baselines: held-out bits per byte of simple models, by name; computed when first asked for.
    """

    train: MapDataset | Iterable[Any]
    held_out: MapDataset | None
    description: str
    collate: Callable[[list[Any]], Any] | None = None
    lengths: NDArray[np.int64] | None = None
    bytes_per_token: float | None = None
    baselines: Callable[[], Mapping[str, float]] = _no_baselines


def as_source(data: Any) -> Source:
    """A :class:`Source` as it is; a bare dataset or stream as a source with nothing held out.

    Raises:
        TypeError: if it is none of them.
    """
    if isinstance(data, Source):
        return data
    name = type(data).__name__
    if is_map_style(data):
        return Source(train=data, held_out=None, description=f"{name}, {len(data)} samples")
    if isinstance(data, Iterable):
        return Source(train=data, held_out=None, description=f"{name}, a stream")
    raise TypeError(f"{name} is neither a distaccum Source nor a dataset with len() and [index], nor an iterable")


def is_map_style(data: Any) -> TypeGuard[MapDataset]:
    """Whether samples can be had by index."""
    return hasattr(data, "__getitem__") and hasattr(data, "__len__")


def batches_itself(data: Any) -> bool:
    """Whether a stream gives micro-batches, as torch's ``DataLoader`` does unless it is told not to."""
    return isinstance(data, DataLoader) and data.batch_sampler is not None


def of_this_rank(stream: Iterable[Any], rank: int, world_size: int) -> Iterable[Any]:
    """A Hugging Face streaming dataset, split over the ranks unless it is already; any other stream as it is."""
    if world_size == 1 or type(stream).__module__.split(".")[0] != "datasets":
        return stream
    if getattr(stream, "_distributed", None) is not None:
        return stream
    from datasets.distributed import split_dataset_by_node  # noqa: PLC0415  an optional extra, there if its dataset is

    split: Iterable[Any] = split_dataset_by_node(cast(Any, stream), rank, world_size)
    return split
