"""From the batch plan to windows of loaded, counted micro-batches."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import count, islice
from time import perf_counter
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from distaccum.batch_plan import BatchPlan
from distaccum.data.source import MapDataset, Source
from distaccum.loss import Loss
from distaccum.shuffle import Shuffle
from distaccum.window import MicroBatch, Window
from distaccum.world import World


class WindowLoader:
    """The windows of one rank, in order, from any window on.

    Samples are fetched by torch's ``DataLoader`` (with its workers, pinning and collation); which ones, and how they
    are grouped, is the plan's arithmetic alone.

    Args:
        dataset: map-style samples; its length is the plan's ``samples``.
        plan: the slicing.
        world: this rank.
        loss: says how many items a batch counts.
        seed: of the order of samples; None for the dataset's own order.
        source: whose collation is used.
        num_workers: loading processes of this rank.
    """

    def __init__(
        self, dataset: MapDataset, plan: BatchPlan, world: World, *, loss: Loss, seed: int | None, source: Source,
        num_workers: int = 0,
    ) -> None:  # fmt: skip
        assert len(dataset) == plan.samples
        self._dataset, self._plan, self._world, self._loss = dataset, plan, world, loss
        self._seed, self._source, self._num_workers = seed, source, num_workers

    def windows(self, start: int = 0, stop: int | None = None) -> Iterator[Window]:
        """Windows ``start``, ``start + 1``, ... counted over all epochs, up to ``stop`` (None: without end).

        A window's count is summed over the ranks before the window is given out: one small host all-reduce.
        """
        batches = iter(self._data_loader(start, stop))
        for index in count(start) if stop is None else range(start, stop):
            epoch, k = divmod(index, self._plan.windows_per_epoch)
            waited = perf_counter()
            slices = self._plan.micro_batches(k, self._world.rank)
            micro_batches = [
                self._counted(positions, batch)
                for positions, batch in zip(slices, islice(batches, len(slices)), strict=True)
            ]
            waited = perf_counter() - waited
            (window_count,) = self._world.sum_counts([sum(micro.count for micro in micro_batches)])
            yield Window(
                index=index,
                epoch=epoch,
                samples=len(self._plan.window(k)),
                count=window_count,
                micro_batches=micro_batches,
                data_wait_s=waited,
            )

    def _counted(self, positions: range, batch: Any) -> MicroBatch:
        if not positions:  # a stand-in: it is run for the collectives' sake and weighs nothing
            return MicroBatch(batch=batch, count=0, weight=0)
        return MicroBatch(batch=batch, count=self._loss.count(batch), weight=1)

    def _data_loader(self, start: int, stop: int | None) -> DataLoader[Any]:
        # Takes none of the model's random numbers; workers of other ranks and of resumed runs draw others.
        digest = hashlib.blake2b(f"{self._seed}/{self._world.rank}/{start}".encode(), digest_size=7).digest()
        seeds = torch.Generator().manual_seed(int.from_bytes(digest))
        return DataLoader(
            cast("Dataset[Any]", self._dataset),  # torch names its base class, and uses len() and [index] only
            batch_sampler=MicroBatchIds(self._plan, self._world.rank, seed=self._seed, start=start, stop=stop),
            collate_fn=self._source.collate,
            num_workers=self._num_workers,
            pin_memory=self._world.device.type == "cuda",
            generator=seeds,
        )


class MicroBatchIds:
    """The sample ids of one rank's micro-batches, window after window: a batch sampler for torch's ``DataLoader``."""

    def __init__(
        self, plan: BatchPlan, rank: int, *, seed: int | None, start: int = 0, stop: int | None = None
    ) -> None:
        self._plan, self._rank, self._seed, self._start, self._stop = plan, rank, seed, start, stop

    def __iter__(self) -> Iterator[list[int]]:
        for index in count(self._start) if self._stop is None else range(self._start, self._stop):
            epoch, k = divmod(index, self._plan.windows_per_epoch)
            order = None if self._seed is None else Shuffle(self._plan.samples, seed=self._seed, epoch=epoch)
            stand_in = self._plan.window(k)[:1]  # any real sample will do where the rank has nothing left
            for positions in self._plan.micro_batches(k, self._rank):
                wanted = np.asarray(positions or stand_in, dtype=np.int64)
                yield (wanted if order is None else order(wanted)).tolist()
