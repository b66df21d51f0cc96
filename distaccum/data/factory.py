"""From data and a plan to a feed: which of the two kinds it is, decided once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import numpy as np
from torch.utils.data import DataLoader

from distaccum.data.adapters import is_unsplit, split_by_rank, to_data_spec, yields_batches
from distaccum.data.loader import MapWindowLoader, WindowLoader
from distaccum.data.plan.batch import BatchPlan, Ids, Plan
from distaccum.data.plan.stream import StreamPlan
from distaccum.data.plan.tokens import TokenPlan
from distaccum.data.spec import DataSpec, MapDataset, is_map_style
from distaccum.data.stream import IterableWindowLoader
from distaccum.distributed.signals import ignore_stop_signals
from distaccum.distributed.world import World
from distaccum.errors import ConfigError


def make_plan(
    source: DataSpec,
    *,
    global_batch_size: int | None,
    tokens: int | None,
    micro_batch_size: int,
    world_size: int,
    seed: int | None,
) -> Plan | StreamPlan:
    """The plan of a source's training data.

    Raises:
        ConfigError: sizes that cannot work, both or none of ``global_batch_size`` and ``tokens``, or a budget of tokens
            over samples of unknown length.
    """
    if global_batch_size is None and tokens is None:
        raise ConfigError("batch.global_size", None, "is not given, and batch.tokens neither", "State one of them")
    if global_batch_size is not None and tokens is not None:
        remedy = "State one of them: batch=tokens switches to a budget of tokens"
        raise ConfigError("batch.tokens", tokens, f"and batch.global_size={global_batch_size} is given too", remedy)
    if source.micro_batch_size is not None and source.micro_batch_size != micro_batch_size:
        remedy = "Give both the same number"
        raise ConfigError(
            "micro_size", micro_batch_size, f"the loader's batch_size is {source.micro_batch_size}", remedy
        )
    sizes = {"micro_batch_size": micro_batch_size, "world_size": world_size}
    if not is_map_style(source.train):
        if global_batch_size is None:
            remedy = "Use batch.global_size for streams: a rank cannot know what the others' samples hold"
            raise ConfigError("batch.tokens", tokens, "the data is a stream", remedy)
        return StreamPlan(global_batch_size=global_batch_size, batched=yields_batches(source.train), **sizes)
    seed = seed if source.shuffle else None
    if global_batch_size is not None:
        return BatchPlan(samples=len(source.train), global_batch_size=global_batch_size, seed=seed, **sizes)
    assert tokens is not None
    return TokenPlan(lengths=_known(source, "batch.tokens", tokens), tokens=tokens, seed=seed, **sizes)


def check_workers(source: DataSpec, plan: Plan | StreamPlan, num_workers: int) -> None:
    """Raises ConfigError where loading processes would each give the whole stream, or there are some already."""
    if isinstance(plan, StreamPlan) and num_workers and not is_unsplit(source.train):
        remedy = "Use 0, and a DataLoader with workers of its own as data"
        raise ConfigError("trainer.num_workers", num_workers, "the data is a stream", remedy)


def build_loader(
    source: DataSpec, plan: Plan | StreamPlan, world: World, *, num_workers: int = 0, group_by_length: bool = False
) -> WindowLoader:
    """The feed of a source's training data.

    Raises:
        ConfigError: grouping by a length that is not known, or a stream that is not this rank's.
    """
    if isinstance(plan, StreamPlan):
        check_workers(source, plan, num_workers)
        stream = split_by_rank(cast("Iterable[Any]", source.train), world.rank, world.size)
        if num_workers:
            stream = DataLoader(
                cast(Any, stream), batch_size=None, num_workers=num_workers, worker_init_fn=ignore_stop_signals
            )
        return IterableWindowLoader(stream, plan, world, collate=source.collate)
    return MapWindowLoader(
        cast(MapDataset, source.train),
        plan,
        world,
        collate=source.collate,
        num_workers=num_workers,
        group_by=_known(source, "batch.group_by_length", True) if group_by_length else None,
    )


def as_loader(
    data: Any,
    world: World,
    *,
    global_batch_size: int | None,
    tokens: int | None,
    micro_batch_size: int | None,
    seed: int,
) -> WindowLoader:
    """The feed of whatever a loop of one's own iterates over: see :func:`distaccum.data.adapters.to_data_spec`.

    Only a bare iterable is another thing here: a stream of this rank's micro-batches, not of its samples.

    Raises:
        ConfigError: sizes that cannot work or are missing, or data that cannot be planned.
    """
    if micro_batch_size is None:
        raise ConfigError("micro_batch_size", None, "is not given", "State the samples that fit on a device at once")
    sizes: dict[str, Any] = {
        "global_batch_size": global_batch_size,
        "tokens": tokens,
        "micro_batch_size": micro_batch_size,
    }
    sizes["world_size"] = world.size
    if isinstance(data, DataSpec | DataLoader) or is_map_style(data):
        source = to_data_spec(data)
        plan = make_plan(source, **sizes, seed=seed)
        workers = data.num_workers if isinstance(data, DataLoader) and not isinstance(plan, StreamPlan) else 0
        return build_loader(source, plan, world, num_workers=workers)
    if global_batch_size is None:
        raise ConfigError("global_batch_size", None, "is not given", "State the samples of one optimizer step")
    stream_plan = StreamPlan(
        global_batch_size=global_batch_size, micro_batch_size=micro_batch_size, world_size=world.size, batched=True
    )
    return IterableWindowLoader(split_by_rank(data, world.rank, world.size), stream_plan, world)


def _known(source: DataSpec, key: str, value: object) -> Ids:
    if source.lengths is None:
        remedy = "Give lengths to its Source: the tokens of each training sample"
        raise ConfigError(key, value, "the data does not say how long its samples are", remedy)
    lengths = np.asarray(source.lengths, dtype=np.int64)
    samples = len(cast(MapDataset, source.train))
    if lengths.shape != (samples,):
        problem = f"the data gives lengths of shape {lengths.shape} for {samples} samples"
        raise ConfigError(key, value, problem, "Give one length for each training sample")
    return lengths
