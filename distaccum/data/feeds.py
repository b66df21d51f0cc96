"""From data and a plan to a feed: which of the two kinds it is, decided once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, cast

import numpy as np
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from distaccum.batch_plan import BatchPlan, Ids, Plan
from distaccum.data.loader import Feed, PlannedFeed
from distaccum.data.source import MapDataset, Source, as_source, batches_itself, is_map_style, of_this_rank
from distaccum.data.stream import StreamFeed
from distaccum.errors import ConfigError
from distaccum.stream_plan import StreamPlan
from distaccum.token_plan import TokenPlan
from distaccum.world import World


def make_plan(
    source: Source, *, global_size: int | None, tokens: int | None, micro_size: int, world_size: int, seed: int | None
) -> Plan | StreamPlan:
    """The plan of a source's training data.

    Raises:
        ConfigError: sizes that cannot work, both or none of ``global_size`` and ``tokens``, or a budget of tokens over
            samples of unknown length.
    """
    if global_size is None and tokens is None:
        raise ConfigError("batch.global_size", None, "is not given, and batch.tokens neither", "State one of them")
    if global_size is not None and tokens is not None:
        remedy = "State one of them: batch=tokens switches to a budget of tokens"
        raise ConfigError("batch.tokens", tokens, f"and batch.global_size={global_size} is given too", remedy)
    sizes = {"micro_size": micro_size, "world_size": world_size}
    if not is_map_style(source.train):
        if global_size is None:
            remedy = "Use batch.global_size for streams: a rank cannot know what the others' samples hold"
            raise ConfigError("batch.tokens", tokens, "the data is a stream", remedy)
        return StreamPlan(global_size=global_size, batched=batches_itself(source.train), **sizes)
    if global_size is not None:
        return BatchPlan(samples=len(source.train), global_size=global_size, seed=seed, **sizes)
    assert tokens is not None
    return TokenPlan(lengths=_known(source, "batch.tokens", tokens), tokens=tokens, seed=seed, **sizes)


def make_feed(
    source: Source, plan: Plan | StreamPlan, world: World, *, num_workers: int = 0, group_by_length: bool = False
) -> Feed:
    """The feed of a source's training data.

    Raises:
        ConfigError: grouping by a length that is not known.
    """
    if isinstance(plan, StreamPlan):
        stream = of_this_rank(cast("Iterable[Any]", source.train), world.rank, world.size)
        if num_workers and not plan.batched:
            stream = DataLoader(cast(Any, stream), batch_size=None, num_workers=num_workers)
        return StreamFeed(stream, plan, world, collate=source.collate)
    return PlannedFeed(
        cast(MapDataset, source.train), plan, world, collate=source.collate, num_workers=num_workers,
        group_by=_known(source, "batch.group_by_length", True) if group_by_length else None,
    )  # fmt: skip


def feed_of(
    data: Any, world: World, *, global_size: int | None, tokens: int | None, micro_size: int | None, seed: int
) -> Feed:
    """The feed of whatever a loop of one's own iterates over.

    A ``DataLoader`` over a map-style dataset is planned: its dataset, collation and workers are used, and its order is
    shuffled if its sampler was a shuffling one. So are a ``Source`` and a bare dataset, shuffled. Any other iterable is
    a stream of this rank's own micro-batches.

    Raises:
        ConfigError: sizes that cannot work or are missing, a loader's batch size that is not ``micro_size``, or an
            order that cannot be planned.
    """
    if micro_size is None:
        raise ConfigError("micro_size", None, "is not given", "State the samples that fit on a device at once")
    sizes: dict[str, Any] = {"global_size": global_size, "tokens": tokens, "micro_size": micro_size}
    sizes["world_size"] = world.size
    if isinstance(data, Source) or is_map_style(data):
        source = as_source(data)
        return make_feed(source, make_plan(source, **sizes, seed=seed), world)
    if not isinstance(data, DataLoader) or not is_map_style(data.dataset):
        if global_size is None:
            raise ConfigError("global_size", None, "is not given", "State the samples of one optimizer step")
        plan = StreamPlan(global_size=global_size, micro_size=micro_size, world_size=world.size, batched=True)
        return StreamFeed(data, plan, world)
    if data.batch_size is not None and data.batch_size != micro_size:
        remedy = "Give both the same number"
        raise ConfigError("micro_size", micro_size, f"the loader's batch_size is {data.batch_size}", remedy)
    source = replace(as_source(data.dataset), collate=data.collate_fn)
    plan_of_source = make_plan(source, **sizes, seed=seed if _shuffles(data) else None)
    return make_feed(source, plan_of_source, world, num_workers=data.num_workers)


def _shuffles(loader: DataLoader[Any]) -> bool:
    sampler: Any = loader.sampler if isinstance(loader.batch_sampler, BatchSampler) else loader.batch_sampler
    if isinstance(sampler, SequentialSampler):
        return False
    if isinstance(sampler, RandomSampler) and not sampler.replacement:
        return True
    if isinstance(sampler, DistributedSampler):  # the plan does its work, and pads nothing
        return sampler.shuffle
    remedy = "Use shuffle=True or False, or give a stream of this rank's own batches: iter(loader)"
    raise ConfigError("loader", type(sampler).__name__, "draws samples in an order that cannot be planned", remedy)


def _known(source: Source, key: str, value: object) -> Ids:
    if source.lengths is None:
        remedy = "Give lengths to its Source: the tokens of each training sample"
        raise ConfigError(key, value, "the data does not say how long its samples are", remedy)
    return np.asarray(source.lengths, dtype=np.int64)
