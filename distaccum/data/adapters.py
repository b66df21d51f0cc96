"""Converts datasets, DataLoaders and iterables to a :class:`DataSpec`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from distaccum.data.spec import DataSpec, is_map_style
from distaccum.errors import ConfigError


def to_data_spec(data: Any) -> DataSpec:
    """The spec of ``data``: itself, or one without evaluation samples for a bare dataset, ``DataLoader`` or stream.

    A ``DataLoader`` over a map-style dataset gives its dataset, collation and order, so that the plan can divide the
    samples among the ranks. One over an iterable dataset is a stream of this rank's micro-batches.

    Raises:
        TypeError: ``data`` is none of these.
        ConfigError: a ``DataLoader`` over a map-style dataset whose order or selection cannot be planned.
    """
    name = type(data).__name__
    if isinstance(data, DataSpec):
        return data
    if isinstance(data, DataLoader):
        return _spec_of(data)
    if is_map_style(data):
        return DataSpec(train=data, eval_dataset=None, description=f"{name}, {len(data)} samples")
    if isinstance(data, Iterable):
        return DataSpec(train=data, eval_dataset=None, description=f"{name}, a stream")
    raise TypeError(f"{name} is neither a distaccum DataSpec nor a dataset with len() and [index], nor an iterable")


def yields_batches(data: Any) -> bool:
    """Whether a stream yields micro-batches, as torch's ``DataLoader`` does unless its ``batch_size`` is None."""
    return isinstance(data, DataLoader) and data.batch_sampler is not None


def split_by_rank(stream: Iterable[Any], rank: int, world_size: int) -> Iterable[Any]:
    """Splits a Hugging Face streaming dataset over the ranks unless it is already; returns any other stream as it is.

    Raises:
        ConfigError: a ``DataLoader`` holds it, and it is not split: every rank would take all of it.
    """
    if world_size == 1:
        return stream
    if is_unsplit(getattr(stream, "dataset", None)):
        problem = f"its dataset is not split over the {world_size} ranks, which would all take the whole of it"
        remedy = "Call datasets.distributed.split_dataset_by_node(dataset, rank, world_size) before"
        raise ConfigError("data", type(stream).__name__, problem, remedy)
    if not is_unsplit(stream):
        return stream
    from datasets.distributed import split_dataset_by_node  # noqa: PLC0415  an optional extra, there if its dataset is

    split: Iterable[Any] = split_dataset_by_node(cast(Any, stream), rank, world_size)
    return split


def is_unsplit(stream: Any) -> bool:
    """Whether ``stream`` is a Hugging Face streaming dataset that is not divided among the ranks."""
    is_hugging_face = type(stream).__module__.split(".")[0] == "datasets"
    return is_hugging_face and not is_map_style(stream) and getattr(stream, "_distributed", None) is None


def _spec_of(loader: DataLoader[Any]) -> DataSpec:
    if not is_map_style(loader.dataset):
        description = f"{type(loader.dataset).__name__}, a stream of micro-batches"
        return DataSpec(train=loader, eval_dataset=None, description=description, micro_batch_size=loader.batch_size)
    batches: Any = loader.batch_sampler
    if type(batches).__name__ != BatchSampler.__name__ or not isinstance(batches, BatchSampler):
        raise _unplannable(batches, "makes batches of its own")
    if batches.drop_last:
        raise ConfigError("loader", "drop_last=True", "leaves samples out", "Drop it: ragged windows are exact")
    size = len(loader.dataset)
    return DataSpec(
        train=loader.dataset,
        eval_dataset=None,
        description=f"{type(loader.dataset).__name__}, {size} samples",
        collate=loader.collate_fn,
        shuffle=_shuffles(batches.sampler, size),
        micro_batch_size=batches.batch_size,
    )


def _shuffles(sampler: Any, size: int) -> bool:
    """Whether a sampler that gives every sample once shuffles them."""
    if isinstance(sampler, DistributedSampler):  # the plan divides the samples in its place, and pads nothing
        return sampler.shuffle
    if not isinstance(sampler, RandomSampler | SequentialSampler) or getattr(sampler, "replacement", False):
        raise _unplannable(sampler, "draws samples in an order that cannot be planned")
    if len(sampler) != size:
        raise _unplannable(sampler, f"draws {len(sampler)} of {size} samples")
    return isinstance(sampler, RandomSampler)


def _unplannable(sampler: Any, problem: str) -> ConfigError:
    remedy = "Use shuffle=True or False, over a Subset if need be; or give a stream of this rank's own part in batches"
    return ConfigError("loader", type(sampler).__name__, problem, remedy)
