"""What loading processes load ahead: how many micro-batches, and with which random numbers."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from distaccum.data import loading_processes
from distaccum.data.batches import map_tensors
from distaccum.data.plan.batch import Plan
from distaccum.data.plan.stream import StreamPlan
from distaccum.data.spec import WorkerOptions
from distaccum.distributed.random import seed_others
from distaccum.errors import DataWarning

_log = logging.getLogger(__name__)
_MIB = 2**20
_TORCHS_FACTOR = 2  # of a DataLoader that is told none


def prefetch_factor(workers: WorkerOptions, window: int) -> int | None:
    """Items that each loading process has ahead, so that together they have ``workers.prefetch_windows`` windows.

    Torch's ``DataLoader`` sends an item's number to a process whenever it hands one out. So when all items of a window
    are taken, the processes are at those of the next one, and load them while the window is computed. A factor that is
    stated, or torch's own, is kept where it is larger; with no ``prefetch_windows`` it is all there is. All of them
    together are no more than ``workers.most_ahead``.

    Args:
        workers: their number, and what is stated.
        window: the items of a rank's largest window: micro-batches, or samples of a stream.

    Returns:
        Torch's ``prefetch_factor``; None without loading processes.
    """
    if not workers.num_workers:
        return None
    wanted = -(-workers.prefetch_windows * window // workers.num_workers)
    factor = max(wanted, workers.prefetch_factor or _TORCHS_FACTOR)
    return factor if workers.most_ahead is None else min(factor, max(1, workers.most_ahead // workers.num_workers))


def items_of_window(plan: Plan | StreamPlan) -> int:
    """The items of a rank's largest window: micro-batches, or samples of a stream; of limits of tokens in epoch 0."""
    if isinstance(plan, StreamPlan):
        return -(-plan.wanted(0) // plan.world_size)
    steps: int = plan.as_dict()["accumulation_steps"]
    return steps


def note_memory(window: Sequence[Any], ahead: int) -> None:
    """Logs the host memory that micro-batches loaded ahead may take, and warns where shared memory cannot hold them.

    Args:
        window: a window's micro-batches on the host, after which those ahead are reckoned.
        ahead: how many of them may be loaded ahead.
    """
    sizes: list[int] = []
    for batch in window:
        map_tensors(batch, lambda tensor: sizes.append(tensor.nbytes))
    held, limit = sum(sizes) / max(len(window), 1) * ahead, loading_processes.shared_memory()
    _log.info("up to %d micro-batches are loaded ahead: about %.1f MiB of host memory", ahead, held / _MIB)
    if held > limit:
        what = f"up to {ahead} micro-batches are loaded ahead, about {held / _MIB:,.0f} MiB"
        where = f"and the shared memory that they travel through has {limit / _MIB:,.0f} MiB"
        remedy = f"{loading_processes.MORE_SHARED_MEMORY[0].upper()}{loading_processes.MORE_SHARED_MEMORY[1:]}"
        warnings.warn(f"{what}, {where}. {remedy}, or set prefetch_windows=0", DataWarning, stacklevel=2)


def stream_loader(stream: IterableDataset[Any], workers: WorkerOptions, window: int) -> DataLoader[Any]:
    """Torch's ``DataLoader`` of the samples of a stream that divides itself among the loading processes.

    Args:
        stream: the samples of this rank.
        workers: how they are loaded.
        window: the samples of a rank's window.
    """
    return DataLoader(
        stream,
        batch_size=None,
        num_workers=workers.num_workers,
        worker_init_fn=loading_processes.begin,
        multiprocessing_context=workers.multiprocessing_context,
        timeout=workers.timeout,
        prefetch_factor=prefetch_factor(workers, window),
    )


class SeededIds(list[int]):
    """The samples of a micro-batch, as a plain list for the loading process that gets them, which they seed.

    Torch pickles them into a process's queue, and the process loads them as soon as it has unpickled them: what a
    dataset draws from the global generators of torch, NumPy and Python is then a function of the key. It depends
    neither on which process loads, nor on what it has loaded before or how far ahead it is.
    """

    def __init__(self, ids: list[int], key: int) -> None:
        super().__init__(ids)
        self.key = key

    def __reduce__(self) -> tuple[Any, ...]:
        return _seeded, (self.key, list(self))

    @classmethod
    def here(cls, ids: list[int], key: int) -> list[int]:
        """The ids, with which this process seeds its own generators: it loads the samples next."""
        return _seeded(key, ids)


class Seeded:
    """Micro-batches of which each seeds whoever loads it: this process, or the loading process that gets it."""

    def __init__(self, batches: Sequence[list[int]], *, key: int) -> None:
        self._batches, self._key = batches, key

    def __iter__(self) -> Iterator[list[int]]:
        for ids in self._batches:
            _seeded(self._key, ids)
            yield SeededIds(ids, self._key)


def _seeded(key: int, ids: list[int]) -> list[int]:
    torch.default_generator.manual_seed(key)  # of the host alone
    seed_others(key)
    return ids
