"""Samples that are read beside the training, for what is to be known of them."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset

from distaccum.data.loading_processes import Iteration, WorkerInit
from distaccum.data.spec import MapDataset, WorkerOptions


def reading(
    dataset: MapDataset, batches: Sequence[list[int]], of: Callable[[list[Any]], Any], workers: WorkerOptions
) -> Iterator[Any]:
    """What ``of`` makes of the samples of each batch; after one that raises, the next may be asked for.

    Where loading processes are forked, one of them reads. A dataset that opens its file with its first sample, as one
    does for loading processes, would open it in this process, and all that are forked later would share the open file
    and its one position: they would read each other's samples. Where they are started otherwise, they get the dataset
    pickled, as an open file cannot be; what is read here is such a copy.

    Args:
        dataset: map-style samples.
        batches: the samples of each, by number.
        of: from a batch's samples to what is wanted of them.
        workers: how the others are loaded.
    """
    forked = workers.num_workers > 0 and start_method(workers.multiprocessing_context) == "fork"
    if workers.num_workers and not forked:
        with suppress(Exception):  # it is pickled for the loading processes too, which then say so
            dataset = pickle.loads(pickle.dumps(dataset))  # noqa: S301  written here
    loader: DataLoader[Any] = DataLoader(
        cast("Dataset[Any]", dataset),  # torch names its base class, and uses [index] only
        batch_sampler=cast(Any, batches),
        collate_fn=of,
        num_workers=int(forked),
        multiprocessing_context="fork" if forked else None,
        worker_init_fn=WorkerInit(workers.worker_init_fn),
        timeout=workers.timeout if forked else 0,
        generator=torch.Generator(),  # of the process's seed: none of the model's numbers is drawn
    )
    return Iteration().begin(loader)


def start_method(context: Any) -> str | None:
    """That of a ``DataLoader``'s ``multiprocessing_context``: a context, a name, or None for the default."""
    if isinstance(context, str):
        return context
    return str((multiprocessing if context is None else context).get_start_method())
