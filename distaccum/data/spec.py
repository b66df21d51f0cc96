"""The description of a dataset: training and evaluation samples, and how to batch and read them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeGuard

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import IterableDataset


class Tokenizer(Protocol):
    """Texts to token ids and back; those of transformers are such."""

    def encode(self, text: str, /) -> list[int]: ...

    def decode(self, ids: list[int], /) -> str: ...


Ignored = Mapping[str, float] | Mapping[int, float]
"""Parts of a batch, by name or position, and the value with which a row of it counts nothing."""


class MapDataset(Protocol):
    """A map-style dataset as in ``torch.utils.data``: any object with a length and samples by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """What a ``DataLoader`` says about its loading processes, under torch's names.

    ``pin_memory``: whether a thread pins what they load; None: where the rank has a GPU. ``seed`` is that of its
    ``generator``, from which the processes' seeds follow; None without one. ``prefetch_windows`` is none of torch's:
    the windows that they load ahead; 0: what ``prefetch_factor`` says. Nor is ``most_ahead``: the most micro-batches
    that fit into memory beside a window; None: any number.
    """

    num_workers: int = 0
    worker_init_fn: Callable[[int], None] | None = None
    multiprocessing_context: Any = None
    timeout: float = 0
    prefetch_factor: int | None = None
    persistent_workers: bool = True
    pin_memory: bool | None = None
    seed: int | None = None
    prefetch_windows: int = 1
    most_ahead: int | None = None


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """Training and evaluation samples, and how to batch and read them.

    Args:
        train: the training samples, by index; or a stream: an iterable of this rank's samples, iterated once per epoch,
            or of its micro-batches if it is a ``DataLoader`` over an iterable dataset or ``batched``.
        eval_dataset: samples that are never trained on, or several sets of them by name; None where there are none.
        description: one line for the start of the run; by default the type of ``train``.
        collate: from a list of samples to a batch; None for torch's ``default_collate``.
        lengths: tokens of each training sample, for token budgets and for grouping; None where not known.
        sample_tokens: of every training sample, where all have as many and ``lengths`` is not given.
        shuffle: whether to shuffle the training samples every epoch; False keeps the dataset's own order.
        weights: of each training sample: an epoch draws as many samples as there are, each time one with a probability
            in proportion, as ``WeightedRandomSampler`` does. None: an epoch has each sample once.
        micro_batch_size: of the micro-batches, where the data fix it: the run must state the same.
        batched: whether a stream yields micro-batches; None: a ``DataLoader`` does, any other stream yields samples.
        batch_size: from a micro-batch of a stream to the number of its samples; None to measure it by its parts.
        may_repeat: whether the streams of ranks, or of loading processes, may hold the same items. Otherwise streams
            that begin with the same items are refused, as they were not divided.
        order_seed: added to the run's seed for the order of samples: a ``DataLoader``'s own.
        workers: how samples are loaded, where the data come with a ``DataLoader``.
        ignored: the parts of a batch, by name or position, that make a row of it count nothing, and their value there,
            as ``{"labels": -100}``; None where nothing does.
        pad_rows: whether micro-batches of fewer samples than the others are filled up with such rows.
        bytes_per_token: for text, to report bits per byte; None where the loss cannot be read so.
        baselines: computes the bits per byte of simple models on the evaluation samples, by name.
        classes: their names, in the order of the numbers that labels have; empty where not known.
        tokenizer: from texts to the samples' token ids and back, for the texts of evaluations.
    """

    train: MapDataset | Iterable[Any]
    eval_dataset: MapDataset | Mapping[str, MapDataset] | None = None
    description: str = ""
    collate: Callable[[list[Any]], Any] | None = None
    lengths: NDArray[np.int64] | None = None
    sample_tokens: int | None = None
    shuffle: bool = True
    weights: Sequence[float] | NDArray[np.floating] | Tensor | None = None
    micro_batch_size: int | None = None
    batched: bool | None = None
    batch_size: Callable[[Any], int] | None = None
    may_repeat: bool = False
    order_seed: int = 0
    workers: WorkerOptions = field(default_factory=WorkerOptions)
    ignored: Ignored | None = None
    pad_rows: bool = False
    bytes_per_token: float | None = None
    baselines: Callable[[], Mapping[str, float]] = dict
    classes: Sequence[str] = ()
    tokenizer: Tokenizer | None = None

    @property
    def held_out(self) -> dict[str, MapDataset]:
        """The sets to evaluate on, by name; a single one has the name ``""``."""
        if self.eval_dataset is None:
            return {}
        return dict(self.eval_dataset) if isinstance(self.eval_dataset, Mapping) else {"": self.eval_dataset}


def is_map_style(data: Any) -> TypeGuard[MapDataset]:
    """Whether ``data`` has a length and samples by index.

    Torch's ``IterableDataset`` is none, even with a ``__len__``: it inherits an index operator that only raises.
    """
    if isinstance(data, IterableDataset):
        return False
    return hasattr(data, "__getitem__") and hasattr(data, "__len__")
