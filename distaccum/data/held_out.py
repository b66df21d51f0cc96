"""Held-out samples on their way to an evaluation: which of them a rank takes, in which batches, and who loads them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain, repeat
from multiprocessing.process import BaseProcess
from typing import Any

from torch.utils.data import DataLoader

from distaccum.data import loading_processes
from distaccum.data.cutting import CannotCutError, cut, shape_of
from distaccum.data.factory import loading_options
from distaccum.data.loader import Collate, expect_all, generator_of, torch_loader
from distaccum.data.loading_processes import SeededIds, start_method
from distaccum.data.spec import DataSpec, MapDataset, WorkerOptions
from distaccum.distributed.random import keys_of
from distaccum.distributed.world import World
from distaccum.errors import DataError


class HeldOut:
    """A held-out set on this rank: its batches, loaded by torch's ``DataLoader`` as the training samples are.

    The samples come in the dataset's own order, each once. A batch holds the same samples on any number of ranks, to
    which whole batches are dealt in turn, so that their sums are the same numbers. Only where there are fewer samples
    than ``micro_batch_size`` for each rank are batches smaller, so that every rank has one.

    Forked workers live for one evaluation: one costs tens of milliseconds, and what it holds would lie idle in between.
    Workers that are started otherwise import everything anew, for seconds, and stay until the end of the run.

    Args:
        dataset: map-style samples.
        world: this rank.
        limit: the most samples, the first of the dataset; None for all.
        micro_batch_size: the most samples of a batch.
        collate: from samples to a batch; None for torch's ``default_collate``.
        workers: how samples are loaded; no more of them than batches are started.
        seed: of the workers' seeds.
        fixed_batches: whether batches are the same on any number of ranks; some of these may have none.
    """

    def __init__(
        self,
        dataset: MapDataset,
        world: World,
        *,
        limit: int | None,
        micro_batch_size: int,
        collate: Collate | None,
        workers: WorkerOptions,
        seed: int,
        fixed_batches: bool = False,
    ) -> None:
        self.samples = len(dataset) if limit is None else min(limit, len(dataset))
        """How many of its samples are evaluated, over all ranks."""
        size = max(1, min(micro_batch_size, self.samples // (1 if fixed_batches else world.size)))
        self._size, self._rank, self._world_size = size, world.rank, world.size
        batches = self.batches_of_all = -(-self.samples // size)
        """How many batches there are, over all ranks."""
        self.rounds = -(-batches // world.size)
        """The most batches that a rank has."""
        self.numbers = range(world.rank, batches, world.size)
        """Which of them are this rank's."""
        self._own = len(self.numbers)
        seed = seed if workers.seed is None else workers.seed
        self._world = world
        self._processes: list[BaseProcess] = []
        self._iteration = loading_processes.Iteration()
        workers = replace(workers, num_workers=min(workers.num_workers, max(1, self._own)))
        self._ids = _Ids(seed, here=fixed_batches and not workers.num_workers)
        self._loader: DataLoader[Any] = torch_loader(
            dataset,
            self._ids,
            world,
            collate=collate,
            workers=workers,
            generator=generator_of(seed, world),
            persistent=workers.num_workers > 0 and start_method(workers.multiprocessing_context) != "fork",
        )
        assert self._loader.generator is not None
        self._seed = self._loader.generator.initial_seed()

    @property
    def first_ids(self) -> list[int]:
        """The samples of this rank's first batch; empty where it has none."""
        return next(self._own_ids(), [])

    def batches(self, *, in_lockstep: bool) -> Iterator[tuple[Any, bool]]:
        """This rank's batches on the host; ``in_lockstep`` also those that only match the other ranks' number.

        Yields:
            A batch, and whether it counts.

        Raises:
            DataError: a loading process has died.
        """
        extra = self.rounds - self._own if in_lockstep else 0
        if self._own + extra:
            flags = chain(repeat(True, self._own), repeat(False))
            yield from zip(self.load(chain(self._own_ids(), repeat([0], extra))), flags, strict=False)

    def load(self, ids: Iterable[list[int]]) -> Iterator[Any]:
        """The batches of these samples.

        Raises:
            DataError: a loading process has died, or there are fewer batches.
        """
        self._ids.give(ids)
        assert self._loader.generator is not None
        self._loader.generator.manual_seed(self._seed)  # of workers' own seeds, whatever was evaluated before
        others = loading_processes.children()
        batches = self._iteration.begin(self._loader)
        started = [process for process in loading_processes.children() if process not in others]
        self._processes = started or self._processes  # those that stay were started before
        found = 0
        try:
            for batch in batches:
                found += 1
                yield _there(batch)
        except Exception as problem:
            meant = loading_processes.explain(problem, self._processes, "the held-out data", self._world)
            if meant is problem:
                raise
            raise meant from problem
        expect_all(self._ids.taken, found, "the held-out data")

    def size_of(self, number: int) -> int:
        """How many samples are in a batch, by its number among all ranks'."""
        return min(self._size, self.samples - self._size * number)

    def rows_of(self, batch: Any) -> int:
        """The samples of one of its batches, if it can be cut between them; else 0."""
        rows, _ = shape_of(batch)
        try:
            cut(batch, 0, rows, rows)
        except CannotCutError:
            return 0
        return rows if rows <= self._size else 0

    def _own_ids(self) -> Iterator[list[int]]:
        step = self._size * self._world_size
        for first in range(self._size * self._rank, self.samples, step):
            yield list(range(first, min(first + self._size, self.samples)))


def _there(batch: Any) -> Any:
    if batch is None:
        raise DataError("the collate function gave None for held-out samples: take what is broken out of the set")
    return batch


class _Ids:
    """A batch sampler that gives what it was given last.

    Each batch seeds the loading process that gets it (``here``: this one, which loads it next): what its samples draw
    depends on the batch alone.
    """

    def __init__(self, seed: int, *, here: bool) -> None:
        self._seed, self._here = seed, here
        self.give(())

    def give(self, ids: Iterable[list[int]]) -> None:
        """Sets what the next iteration gives."""
        self._given, self.taken = ids, 0

    def __iter__(self) -> Iterator[list[int]]:
        for ids in self._given:
            self.taken += 1
            (key,) = keys_of(ids[:1], "held out", self._seed)
            yield SeededIds.here(ids, key) if self._here else SeededIds(ids, key)


def evaluation_workers(data: DataSpec, num_workers: int, options: Mapping[str, Any] | None = None) -> WorkerOptions:
    """How held-out samples are loaded: as those to train on.

    Of a stream's ``DataLoader`` that is all but ``worker_init_fn``, which divides the stream.

    Args:
        data: of the run.
        num_workers: loading processes of this rank, where the data name none.
        options: of those processes, under torch's names; None for what torch has.
    """
    if num_workers == 0 and isinstance(data.train, DataLoader):
        return WorkerOptions(
            num_workers=data.train.num_workers,
            multiprocessing_context=data.train.multiprocessing_context,
            timeout=data.train.timeout,
            prefetch_factor=data.train.prefetch_factor,
        )
    return loading_options(data, num_workers=num_workers, options=options)
