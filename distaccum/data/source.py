"""What a data source gives the trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol


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
        train: the training samples.
        held_out: samples that are never trained on; None where there are none.
        description: one line for the start of the run.
        collate: from a list of samples to a batch; None for torch's ``default_collate``.
        bytes_per_token: for text, to report bits per byte; None where the loss has no such reading.
        baselines: held-out bits per byte of simple models, by name; computed when first asked for.
    """

    train: MapDataset
    held_out: MapDataset | None
    description: str
    collate: Callable[[list[Any]], Any] | None = None
    bytes_per_token: float | None = None
    baselines: Callable[[], Mapping[str, float]] = _no_baselines


def as_source(data: Any) -> Source:
    """A :class:`Source` as it is; a bare map-style dataset as a source with nothing held out.

    Raises:
        TypeError: if it is neither.
    """
    if isinstance(data, Source):
        return data
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return Source(train=data, held_out=None, description=f"{type(data).__name__}, {len(data)} samples")
    raise TypeError(f"{type(data).__name__} is neither a distaccum Source nor a dataset with len() and [index]")
