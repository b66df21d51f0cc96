"""Chooses the plan and the window loader of given data."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from distaccum.config.checks import require
from distaccum.data.adapters import is_hugging_face, is_unsplit, split_by_rank, to_data_spec, yields_batches
from distaccum.data.agreement import tell_of_failure
from distaccum.data.loader import MapWindowLoader, WindowLoader, tokens_of
from distaccum.data.loading_processes import SHARED_MEMORY, stream_loader
from distaccum.data.plan.batch import CONFIG_KEYS, KEYWORDS, BatchPlan, Ids, Plan, SizeNames
from distaccum.data.plan.shuffle import Weights
from distaccum.data.plan.stream import StreamPlan
from distaccum.data.plan.tokens import MicroTokenPlan, TokenPlan
from distaccum.data.spec import DataSpec, MapDataset, WorkerOptions, is_map_style
from distaccum.data.stream import IterableWindowLoader
from distaccum.distributed.world import World
from distaccum.errors import ConfigError

if TYPE_CHECKING:
    from distaccum.data.plan.scheduled import ScheduledPlan, Stage


def make_plan(
    source: DataSpec,
    *,
    global_batch_size: int | None,
    tokens: int | None,
    micro_batch_size: int,
    world_size: int,
    seed: int | None,
    batched: bool = False,
    stages: Sequence[Stage] = (),
    micro_tokens: int | str | None = None,
    limits_samples: bool = True,
    group_by_length: bool = False,
    names: SizeNames = KEYWORDS,
) -> Plan | StreamPlan:
    """The plan of a source's training data.

    Args:
        source: map-style training data, or a stream.
        global_batch_size: samples per optimizer step over all ranks.
        tokens: instead, tokens per optimizer step.
        micro_batch_size: the most samples one forward/backward on one rank takes.
        world_size: number of ranks.
        seed: for the order of samples.
        batched: whether a stream yields micro-batches; a ``DataLoader`` says so itself.
        stages: the global batches that come before ``global_batch_size``.
        micro_tokens: the most padded tokens of a micro-batch, as the source's collate function pads; ``auto``: as many
            as ``micro_batch_size`` of the longest samples have, until a rehearsal; None: any number.
        limits_samples: whether a micro-batch has no more than ``micro_batch_size`` samples with ``micro_tokens``, too.
        group_by_length: whether the micro-batches of a window hold samples of similar length.
        names: what an error calls the sizes.

    Raises:
        ConfigError: sizes that cannot work, both or none of ``global_batch_size`` and ``tokens``; a budget or a stage
            of tokens, or ``micro_tokens``, over samples of unknown length; stages, ``micro_tokens`` or weights of a
            stream; a sample of more than ``micro_tokens``; grouping by unknown lengths; weights that draw nothing.
    """
    _check_sizes(source, global_batch_size, tokens, micro_batch_size, names)
    sizes: dict[str, Any] = {"micro_batch_size": micro_batch_size, "world_size": world_size, "names": names}
    key, shown = "batch.schedule", ", ".join(map(str, stages))
    problem, remedy = f"and {names.tokens}={tokens} is a budget of tokens", f"Use {names.global_batch_size} with it"
    require(not stages or tokens is None, key, shown, problem, f"{remedy}, or leave it out")
    if source.pad_rows:
        _check_rows(source, "batch.pad_rows" if names is CONFIG_KEYS else "pad_rows")
    weights = None if source.weights is None else _weights_of(source)
    if not is_map_style(source.train):
        if global_batch_size is None:
            remedy = f"Use {names.global_batch_size} for streams: a rank cannot know the lengths of the others' samples"
            raise ConfigError(names.tokens, tokens, "the data is a stream", remedy)
        remedy = "Leave it out: the samples of a stream are not known before they are read"
        require(not stages, key, shown, "the data is a stream", remedy)
        remedy = f"Use {names.micro_batch_size}: the lengths of a stream's samples are not known before they are read"
        require(micro_tokens is None, names.micro_tokens, micro_tokens, "the data is a stream", remedy)
        remedy = "Leave it out: a stream's samples are not known before they are read"
        require(not group_by_length, "batch.group_by_length", True, "the data is a stream", remedy)
        batched = batched or yields_batches(source)
        return StreamPlan(global_batch_size=global_batch_size, batched=batched, **sizes)
    seed = seed + source.order_seed if source.shuffle and seed is not None else None
    sizes |= {"seed": seed, "weights": weights}
    plan: Plan
    if global_batch_size is not None and stages:
        in_tokens = any(stage.unit == "tokens" for stage in stages)
        plan = _scheduled(
            samples=len(source.train),
            stages=tuple(stages),
            global_batch_size=global_batch_size,
            lengths=(source.sample_tokens or lengths_of(source, key, shown)) if in_tokens else None,
            **sizes,
        )
    elif global_batch_size is not None:
        plan = BatchPlan(samples=len(source.train), global_batch_size=global_batch_size, **sizes)
    else:
        assert tokens is not None
        plan = TokenPlan(lengths=lengths_of(source, names.tokens, tokens), tokens=tokens, **sizes)
    if micro_tokens is None:
        return plan.grouped_by_length(lengths_of(source, "batch.group_by_length", True) if group_by_length else None)
    return _within_tokens(
        plan,
        source,
        micro_tokens,
        micro_batch_size,
        grouped=group_by_length,
        limits_samples=limits_samples,
        names=names,
    )


def _weights_of(source: DataSpec) -> Weights:
    key, remedy = "data.weights", "Give a number for each training sample, at least 0, and not 0 for all"
    require(is_map_style(source.train), key, None, "the data is a stream", "Draw in the stream, or leave them out")
    problem = "the samples are drawn at random, and the data are not to be shuffled"
    require(source.shuffle, key, None, problem, "Leave shuffle=False out, or the weights")
    weights = torch.as_tensor(source.weights, dtype=torch.float64).detach().cpu().numpy()
    samples = len(cast(MapDataset, source.train))
    problem = f"has the shape {weights.shape} for {samples} samples"
    require(weights.shape == (samples,), key, None, problem, remedy)
    problem = f"are from {weights.min(initial=0.0):g} to {weights.max(initial=0.0):g}"
    require(weights.min(initial=0.0) >= 0 and 0 < weights.sum() < np.inf, key, None, problem, remedy)
    return Weights(weights)


def _scheduled(**settings: Any) -> ScheduledPlan:
    from distaccum.data.plan.scheduled import ScheduledPlan  # noqa: PLC0415  few runs have stages

    return ScheduledPlan(**settings)


def _check_sizes(
    source: DataSpec, global_batch_size: int | None, tokens: int | None, micro_batch_size: int, names: SizeNames
) -> None:
    if global_batch_size is None and tokens is None:
        problem = f"is not given, and {names.tokens} neither"
        raise ConfigError(names.global_batch_size, None, problem, "State one of them")
    if global_batch_size is not None and tokens is not None:
        problem = f"and {names.global_batch_size}={global_batch_size} is given too"
        switch = ": batch=tokens switches to a budget of tokens" if names is CONFIG_KEYS else ""
        raise ConfigError(names.tokens, tokens, problem, f"State one of them{switch}")
    if source.micro_batch_size is not None and source.micro_batch_size != micro_batch_size:
        problem = f"the loader's batch_size is {source.micro_batch_size}"
        raise ConfigError(names.micro_batch_size, micro_batch_size, problem, "Give both the same number")


def _within_tokens(
    plan: Plan,
    source: DataSpec,
    micro_tokens: int | str,
    micro_batch_size: int,
    *,
    grouped: bool,
    limits_samples: bool,
    names: SizeNames,
) -> MicroTokenPlan:
    """The plan with micro-batches of ``micro_tokens`` padded tokens at most."""
    key = names.micro_tokens
    problem, remedy = "the rows of micro-batches are filled up to one number", "Leave pad_rows out"
    require(not source.pad_rows, key, micro_tokens, problem, remedy)
    lengths, padded = lengths_of(source, key, micro_tokens), tokens_of(source.collate)
    if not isinstance(micro_tokens, int):
        micro_tokens = padded(np.full(micro_batch_size, lengths.max()))
    return MicroTokenPlan(
        plan=plan,
        lengths=lengths,
        micro_tokens=micro_tokens,
        tokens_of=padded,
        grouped=grouped,
        limits_samples=limits_samples,
        names=names,
    )


def _check_rows(source: DataSpec, key: str) -> None:
    if not is_map_style(source.train):
        raise ConfigError(key, True, "the data is a stream", "Leave it out, or fill its batches in the stream")
    if not source.ignored:
        problem = "the data does not say with which labels a row counts nothing"
        raise ConfigError(key, True, problem, "Give its DataSpec ignored={'labels': -100}, as the loss ignores it")


# Each epoch tells a stream its number before its processes start, and its samples are collated after they are loaded.
_NOT_OF_STREAMS = ("persistent_workers", "pin_memory")


def check_workers(
    source: DataSpec, plan: Plan | StreamPlan, num_workers: int, options: Mapping[str, Any] | None = None
) -> None:
    """Checks what is stated of loading processes: their number, and ``options`` under torch's names.

    Raises:
        ConfigError: they would each yield the whole stream, the data's own ``DataLoader`` says something else, or there
            are options without processes.
    """
    stated = {name: value for name, value in (options or {}).items() if value is not None}
    if plan.is_stream:
        if num_workers and not is_unsplit(source.train):
            remedy = "Use 0, and a DataLoader with workers of its own as data"
            raise ConfigError("trainer.num_workers", num_workers, "the data is a stream", remedy)
    elif num_workers and source.workers.num_workers not in (0, num_workers):
        problem = f"the loader's num_workers is {source.workers.num_workers}"
        raise ConfigError("trainer.num_workers", num_workers, problem, "Give both the same number, or one of them")
    for name, value in stated.items():
        key, own = f"trainer.loader.{name}", getattr(source.workers, name)
        if plan.is_stream and (not num_workers or (name in _NOT_OF_STREAMS and value)):
            raise ConfigError(key, value, "the data is a stream", "Leave it out, or say it in a DataLoader as data")
        if not num_workers and not source.workers.num_workers:
            if name != "pin_memory":
                problem = "trainer.num_workers is 0: there are no loading processes"
                raise ConfigError(key, value, problem, "State their number, or leave this out")
        elif source.workers.num_workers and value != _name_of_context(own):
            problem = f"the data comes with a DataLoader whose {name} is {_name_of_context(own)}"
            raise ConfigError(key, value, problem, "State it there alone")


def _name_of_context(value: Any) -> Any:
    """The start method of a context of ``multiprocessing``; anything else is itself."""
    return value.get_start_method() if hasattr(value, "get_start_method") else value


_LONGEST_TEMPORARY = 75
"""Of the 107 bytes that a socket's path may have, ``multiprocessing`` adds 32: ``/pymp-12345678/listener-12345678``."""


def loading_options(
    source: DataSpec,
    *,
    num_workers: int = 0,
    prefetch_windows: int = 1,
    options: Mapping[str, Any] | None = None,
    most_ahead: int | None = None,
) -> WorkerOptions:
    """How a source's samples are loaded: as its own ``DataLoader`` says where that has processes, else as stated.

    A Hugging Face stream has processes only where some are stated: the order of its samples depends on their number.

    Raises:
        ConfigError: the processes could not send a batch: the path of their sockets would be too long, or there is no
            shared memory to write to.
    """
    own = replace(source.workers, prefetch_windows=prefetch_windows, most_ahead=most_ahead)
    if not own.num_workers or (is_unsplit(source.train) and not num_workers):
        stated = {name: value for name, value in (options or {}).items() if value is not None}
        own = replace(own, num_workers=num_workers, **stated)
    folder = tempfile.gettempdir() if own.num_workers else ""
    if (length := len(os.fsencode(folder))) > _LONGEST_TEMPORARY:
        problem = f"has {length} bytes, and loading processes have sockets there: {_LONGEST_TEMPORARY} are the most"
        raise ConfigError("TMPDIR", folder, problem, "Name a shorter folder, or use num_workers=0")
    if own.num_workers and sys.platform == "linux" and not os.access(SHARED_MEMORY, os.W_OK):
        problem = f"batches travel through {SHARED_MEMORY}, which cannot be written"
        raise ConfigError("trainer.num_workers", own.num_workers, problem, "Mount it writable, or use num_workers=0")
    return own


def build_loader(
    source: DataSpec, plan: Plan | StreamPlan, world: World, *, workers: WorkerOptions | None = None, seed: int = 0
) -> WindowLoader:
    """The window loader of a source's training data; ``seed`` is that of its micro-steps' random numbers.

    Args:
        source: the data.
        plan: their division.
        world: this rank.
        workers: of :func:`loading_options`, after :func:`check_workers`; None: as the source says.

    Raises:
        ConfigError: a stream that is not split over the ranks.
    """
    workers = workers or loading_options(source)
    if plan.is_stream:
        stream = split_by_rank(cast("Iterable[Any]", source.train), world.rank, world.size)
        if workers.num_workers and is_unsplit(source.train):
            stream = stream_loader(cast(Any, stream), workers, plan.items_of_window)
        return IterableWindowLoader(
            stream,
            plan,
            world,
            collate=source.collate,
            batch_size=source.batch_size,
            may_repeat=source.may_repeat,
            seed=seed,
        )
    return MapWindowLoader(
        cast(MapDataset, source.train),
        plan,
        world,
        collate=source.collate,
        workers=workers,
        seed=seed,
        filled_with=source.ignored if source.pad_rows else None,
    )


Arrange = Callable[[Plan | StreamPlan], Plan | StreamPlan]


def as_loader(
    data: Any,
    world: World,
    *,
    global_batch_size: int | None,
    tokens: int | None,
    micro_batch_size: int | None,
    seed: int,
    prefetch_windows: int = 1,
    arrange: Arrange = lambda plan: plan,
    together: bool = False,
) -> WindowLoader:
    """The window loader of the data of a user's own loop.

    ``arrange`` makes another plan of the planned windows, as :meth:`Numerics.plan` does.
    With ``together`` all ranks build one now and take windows from it next, so that one that cannot tells the others.

    An iterable that is neither a dataset, a ``DataLoader`` nor a ``DataSpec`` is a stream of this rank's micro-batches,
    not of its samples. :func:`distaccum.data.adapters.to_data_spec` tells the kinds apart.

    Raises:
        ConfigError: sizes that cannot work or are missing, or data that cannot be planned.
    """
    sizes = {"global_batch_size": global_batch_size, "tokens": tokens, "micro_batch_size": micro_batch_size}
    try:
        return _as_loader(data, world, sizes, seed=seed, prefetch_windows=prefetch_windows, arrange=arrange)
    except Exception as error:
        if together:
            tell_of_failure(world, error)
        raise


def _as_loader(
    data: Any, world: World, sizes: dict[str, Any], *, seed: int, prefetch_windows: int, arrange: Arrange
) -> WindowLoader:
    if sizes["micro_batch_size"] is None:
        raise ConfigError("micro_batch_size", None, "is not given", "State the samples that fit on a device at once")
    source = to_data_spec(data, world.size)
    bare = not isinstance(data, DataSpec | DataLoader)
    if bare and (isinstance(data, IterableDataset) or is_hugging_face(data)) and not is_map_style(data):
        remedy = "Give DataLoader(data, batch_size=...), or say which, as in DataSpec(train=data, batched=False)"
        raise ConfigError("data", type(data).__name__, "a stream of samples, or of micro-batches", remedy)
    plan = arrange(make_plan(source, **sizes, world_size=world.size, seed=seed, batched=bare))
    return build_loader(
        source, plan, world, workers=loading_options(source, prefetch_windows=prefetch_windows), seed=seed
    )


def lengths_of(source: DataSpec, key: str, value: object) -> Ids:
    """The tokens of each training sample.

    Raises:
        ConfigError: the data does not say how many, which ``value`` of ``key`` needs.
    """
    if source.lengths is None:
        remedy = "Give lengths to its DataSpec: the tokens of each training sample"
        raise ConfigError(key, value, "the data does not say how long its samples are", remedy)
    lengths = np.asarray(source.lengths, dtype=np.int64)
    samples = len(cast(MapDataset, source.train))
    if lengths.shape != (samples,):
        problem = f"the data gives lengths of shape {lengths.shape} for {samples} samples"
        raise ConfigError(key, value, problem, "Give one length for each training sample")
    return lengths
