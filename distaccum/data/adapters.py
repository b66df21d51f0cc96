"""Converts datasets, DataLoaders and iterables to a :class:`DataSpec`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain, islice
from typing import Any, cast

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from distaccum.data.spec import DataSpec, WorkerOptions, is_map_style
from distaccum.errors import ConfigError, shorten

_MOST_NESTED = 1000  # of a container's values that are looked at


def to_data_spec(data: Any, world_size: int | None = None) -> DataSpec:
    """The spec of ``data``: itself, or one without evaluation samples for a bare dataset, ``DataLoader`` or stream.

    A ``DataLoader`` over a map-style dataset gives its dataset, collation and order, so that the plan can divide the
    samples among the ranks, with the options of its loading processes. One over an iterable dataset is a stream of this
    rank's micro-batches. ``world_size`` is that of the run, where it is known.

    Raises:
        TypeError: ``data`` is none of these.
        ConfigError: a ``DataLoader`` whose order, selection or items cannot be planned.
    """
    if isinstance(data, DataLoader):
        return _spec_of(data, world_size)
    if isinstance(data, DataSpec):
        return _completed(data, world_size)
    name = type(data).__name__
    _refuse_look_alikes(data, name)
    if is_map_style(data):
        return DataSpec(train=data, description=f"{name}, {len(data)} samples")
    if isinstance(data, Iterable):
        return DataSpec(train=data, description=f"{name}, a stream")
    raise TypeError(f"{name} is neither a distaccum DataSpec nor a dataset with len() and [index], nor an iterable")


def _completed(spec: DataSpec, world_size: int | None) -> DataSpec:
    """``spec`` with what a ``DataLoader`` in it says, unless it says so itself."""
    if not isinstance(spec.train, DataLoader):
        _refuse_look_alikes(spec.train, type(spec.train).__name__)
        return spec if spec.description else replace(spec, description=type(spec.train).__name__)
    if spec.batched is not None and spec.train.batch_size is None and not is_map_style(spec.train.dataset):
        found = DataSpec(train=spec.train, description=_stream_description(spec.train))  # it says what its items are
    else:
        found = _spec_of(spec.train, world_size)
    return replace(
        spec,
        train=found.train,
        description=spec.description or found.description,
        collate=spec.collate or found.collate,
        shuffle=spec.shuffle and found.shuffle,
        weights=found.weights if spec.weights is None else spec.weights,
        micro_batch_size=spec.micro_batch_size or found.micro_batch_size,
        order_seed=spec.order_seed + found.order_seed,
        workers=found.workers if found.workers.num_workers else spec.workers,
    )


def _refuse_look_alikes(data: Any, name: str) -> None:
    """Raises TypeError for what has len() and [index] and is no dataset: a text, a dict, a pair of tensors."""
    if isinstance(data, str | bytes):
        raise TypeError(f"{name} is no dataset, but a text: load it first, or name a data group that reads it")
    if isinstance(data, Mapping):
        splits = shorten(map(repr, data))
        raise TypeError(
            f"{name} is no dataset, but a mapping of {splits}: give one of its values, or a list of samples"
        )
    fields = isinstance(data, tuple) and len(data) > 1 and all(getattr(part, "shape", ()) for part in data)
    if fields and len({part.shape[0] for part in data}) == 1 and data[0].shape[0] != len(data):
        size = data[0].shape[0]
        raise TypeError(f"a tuple of {len(data)} arrays of {size} rows is no dataset: give TensorDataset(*data)")


def yields_batches(spec: DataSpec) -> bool:
    """Whether a stream yields micro-batches: as it says, or as a ``DataLoader`` with a batch size."""
    if spec.batched is not None:
        return spec.batched
    return isinstance(spec.train, DataLoader) and spec.train.batch_sampler is not None


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
    return is_hugging_face(stream) and not is_map_style(stream) and getattr(stream, "_distributed", None) is None


def is_hugging_face(data: Any) -> bool:
    """Whether ``data`` is a dataset of Hugging Face's library."""
    return type(data).__module__.split(".")[0] == "datasets"


def _spec_of(loader: DataLoader[Any], world_size: int | None) -> DataSpec:
    if not _iterates_as(DataLoader, loader):
        remedy = "Give its dataset, or iterate over it in a class of your own, as a stream of this rank's micro-batches"
        raise ConfigError("loader", type(loader).__name__, "iterates in a way of its own", remedy)
    if not is_map_style(loader.dataset):
        if loader.batch_size is None:
            remedy = "Say which, as in DataSpec(train=loader, batched=True)"
            raise ConfigError("loader", "batch_size=None", "yields samples, or batches that its dataset makes", remedy)
        from distaccum.program import STREAM_WORKERS, load  # noqa: PLC0415  with streams alone

        load(STREAM_WORKERS)(loader)
        return DataSpec(train=loader, description=_stream_description(loader), micro_batch_size=loader.batch_size)
    batches: Any = loader.batch_sampler
    if batches is None:
        remedy = "State the samples of a micro-batch; if each item of the dataset is one, give a stream of them"
        raise ConfigError("loader", "batch_size=None", "makes no batches", remedy)
    if not _iterates_as(BatchSampler, batches):
        raise _unplannable(batches, "makes batches of its own")
    if batches.drop_last:
        raise ConfigError("loader", "drop_last=True", "leaves samples out", "Drop it: ragged windows are exact")
    if not getattr(loader, "in_order", True):
        remedy = "Drop it: a window is made of the samples that the plan gives it"
        raise ConfigError("loader", "in_order=False", "yields batches in the order in which they are ready", remedy)
    size = len(loader.dataset)
    return DataSpec(
        train=loader.dataset,
        description=f"{type(loader.dataset).__name__}, {size} samples",
        collate=loader.collate_fn,
        shuffle=_shuffles(batches.sampler, size, world_size),
        weights=batches.sampler.weights if isinstance(batches.sampler, WeightedRandomSampler) else None,
        micro_batch_size=batches.batch_size,
        order_seed=_seed_of(batches.sampler, loader.generator),
        workers=WorkerOptions(
            num_workers=loader.num_workers,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            timeout=loader.timeout,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers or not loader.num_workers,  # without any it cannot be said
            pin_memory=loader.pin_memory or None,
            seed=None if loader.generator is None else loader.generator.initial_seed(),
        ),
    )


def _is_stateful(sampler: Any) -> bool:
    """Whether it is the sampler of torchdata's ``StatefulDataLoader(shuffle=True)``, which is none of torch's."""
    return type(sampler).__name__ == "RandomSampler" and type(sampler).__module__.split(".")[0] == "torchdata"


def _iterates_as(kind: Any, value: Any) -> bool:
    """Whether ``value`` is a ``kind`` that gives the same items in the same order: no subclass that does otherwise."""
    is_torchs = type(value).__module__.split(".")[0] == "torchdata"  # the same, with a state
    return isinstance(value, kind) and (is_torchs or type(value).__iter__ is kind.__iter__)


def _stream_description(loader: DataLoader[Any]) -> str:
    return f"{type(loader.dataset).__name__}, a stream of micro-batches"


def _shuffles(sampler: Any, size: int, world_size: int | None) -> bool:
    """Whether a sampler that gives every sample once shuffles them."""
    kinds = (DistributedSampler, RandomSampler, SequentialSampler, WeightedRandomSampler)
    known = _is_stateful(sampler) or any(_iterates_as(kind, sampler) for kind in kinds)
    if isinstance(sampler, WeightedRandomSampler):
        if not sampler.replacement or sampler.num_samples != size:
            value = f"WeightedRandomSampler(num_samples={sampler.num_samples}, replacement={sampler.replacement})"
            problem, remedy = (
                f"an epoch draws {size} of {size} samples, with replacement",
                "Draw so many, or give a stream",
            )
            raise ConfigError("loader", value, problem, remedy)
        return True
    if not known or getattr(sampler, "replacement", False):
        raise _unplannable(sampler, "draws samples in an order that cannot be planned")
    if isinstance(sampler, DistributedSampler):  # the plan divides the samples in its place, and pads nothing
        if sampler.drop_last:
            remedy = "Drop it: shares of any size are exact"
            raise ConfigError("loader", "DistributedSampler(drop_last=True)", "leaves samples out", remedy)
        if world_size is not None and sampler.num_replicas != world_size:
            value, problem = f"DistributedSampler(num_replicas={sampler.num_replicas})", f"there are {world_size} ranks"
            raise ConfigError("loader", value, problem, "Leave the sampler out: the plan divides the samples")
        drawn = len(cast(Any, sampler.dataset))
        if drawn != size:
            raise _unplannable(sampler, f"draws from {drawn} of {size} samples")
        return sampler.shuffle
    if len(sampler) != size:
        raise _unplannable(sampler, f"draws {len(sampler)} of {size} samples")
    return isinstance(sampler, RandomSampler) or _is_stateful(sampler)


def _seed_of(sampler: Any, generator: torch.Generator | None) -> int:
    """What the loader's own seeds add to the run's: the same ones give the same order again, other ones another."""
    if isinstance(sampler, DistributedSampler):
        return int(sampler.seed)
    shuffles = isinstance(sampler, RandomSampler | WeightedRandomSampler) or _is_stateful(sampler)
    own = None if _is_stateful(sampler) else getattr(sampler, "generator", None)  # torchdata makes one from any seed
    own = own or (generator if shuffles else None)
    return 0 if own is None else int(own.initial_seed())


def nested(dataset: Any) -> Iterator[Any]:
    """A dataset, and the iterable objects in its attributes, and in lists and mappings there; each once."""
    known, waiting = dict[int, Any](), [dataset]
    while waiting and len(known) < 10 * _MOST_NESTED:
        part = waiting.pop()
        if id(part) in known:
            continue
        known[id(part)] = part
        values: Iterable[Any] = part if isinstance(part, list | tuple) else ()
        if isinstance(part, Mapping):
            values = part.values()
        if hasattr(part, "__dict__"):
            yield part
            values = chain(values, vars(part).values())
        waiting += [value for value in islice(values, _MOST_NESTED) if isinstance(value, Iterable)]


def _unplannable(sampler: Any, problem: str) -> ConfigError:
    remedy = "Use shuffle=True or False, over a Subset if need be; or give a stream of this rank's own part in batches"
    return ConfigError("loader", type(sampler).__name__, problem, remedy)
