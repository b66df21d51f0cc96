"""From the batch plan to windows of loaded, counted micro-batches."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from time import perf_counter
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from distaccum.data.counter import GlobalCounter
from distaccum.data.plan.batch import Epoch, Ids, Plan
from distaccum.data.spec import MapDataset
from distaccum.data.window import Window
from distaccum.distributed.random import capture
from distaccum.distributed.signals import ignore_stop_signals
from distaccum.distributed.world import World

Collate = Callable[[list[Any]], Any]


@runtime_checkable
class WindowLoader(Protocol):
    """Where windows come from."""

    @property
    def position(self) -> dict[str, Any]:
        """What gives a window's number its meaning; a checkpoint is good only where this is the same."""

    def windows(self, epoch: int, start: int, counter: GlobalCounter) -> Iterator[Window]:
        """The windows of an epoch from ``start`` on, counted over all ranks; ends early where ``counter.stopping``."""

    def state(self) -> Any:
        """What this rank needs besides the position to go on after the last window given out; None for nothing."""

    def load_state(self, state: Any) -> None:
        """Takes up :meth:`state`, before :meth:`windows`."""


class MapWindowLoader:
    """The windows of a map-style dataset.

    Samples are fetched by torch's ``DataLoader`` (with its workers, pinning and collation); which ones, and how they
    are grouped, is the plan's arithmetic alone.

    Args:
        dataset: map-style samples; its length is the plan's ``samples``.
        plan: the slicing.
        world: this rank.
        collate: from samples to a batch; None for torch's ``default_collate``.
        num_workers: loading processes of this rank.
        group_by: a length of each sample: within a window, micro-batches then take samples of like length.
    """

    def __init__(
        self,
        dataset: MapDataset,
        plan: Plan,
        world: World,
        *,
        collate: Collate | None = None,
        num_workers: int = 0,
        group_by: Ids | None = None,
    ) -> None:
        assert len(dataset) == plan.samples
        self._plan, self._world = plan, world
        self._ids = MicroBatchIds(plan, world.rank, group_by=group_by)
        # Takes none of the model's random numbers; workers of other ranks draw others.
        digest = hashlib.blake2b(f"{plan.seed}/{world.rank}".encode(), digest_size=7).digest()
        self._loader = DataLoader(
            cast("Dataset[Any]", dataset),  # torch names its base class, and uses len() and [index] only
            batch_sampler=self._ids,
            collate_fn=collate,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            worker_init_fn=ignore_stop_signals,
            pin_memory=world.device.type == "cuda",
            generator=torch.Generator().manual_seed(int.from_bytes(digest)),
        )

    @property
    def position(self) -> dict[str, Any]:
        """The plan's numbers."""
        return self._plan.position

    def windows(self, epoch: int, start: int, counter: GlobalCounter) -> Iterator[Window]:
        """See :class:`WindowLoader`. One small host all-reduce a window."""
        self._ids.seek(epoch, start)
        batches, cut = iter(self._loader), self._plan.epoch(epoch)
        for k in range(start, cut.windows_per_epoch):
            began, restore = perf_counter(), capture()
            filled = sum(1 for positions in cut.micro_batches(k, self._world.rank) if positions)
            micro_batches = [counter.micro_batch(batch) for batch in islice(batches, filled)]
            waited = perf_counter() - began
            counts, _ = counter.all_reduce(micro_batches)
            if counter.stopping:  # the window can be taken again, and what its samples draw
                restore()
                return
            yield Window(
                epoch=epoch,
                samples=len(cut.window(k)),
                counts=counts,
                micro_batches=micro_batches,
                data_wait_s=waited,
                ids=partial(self._ids.of_window, cut, epoch, k),
            )

    def state(self) -> None:
        """The position says it all."""

    def load_state(self, state: Any) -> None:
        """Nothing to take up."""


class MicroBatchIds:
    """The sample ids of one rank's micro-batches, window after window: a batch sampler for torch's ``DataLoader``."""

    def __init__(self, plan: Plan, rank: int, *, group_by: Ids | None = None) -> None:
        self._plan, self._rank, self._group_by = plan, rank, group_by
        self.seek(0, 0)

    def seek(self, epoch: int, start: int) -> None:
        """Sets where the next iteration begins."""
        self._epoch, self._start = epoch, start

    def __iter__(self) -> Iterator[list[int]]:
        cut = self._plan.epoch(self._epoch)
        for k in range(self._start, cut.windows_per_epoch):
            yield from self.of_window(cut, self._epoch, k)

    def of_window(self, cut: Epoch, epoch: int, k: int) -> Iterator[list[int]]:
        """Those of the window ``k`` of the epoch that ``cut`` slices."""
        for positions in (
            self._arranged(cut, epoch, k) if self._group_by is not None else cut.micro_batches(k, self._rank)
        ):
            if len(positions):
                yield self._plan.ids(epoch, np.asarray(positions, dtype=np.int64)).tolist()

    def _arranged(self, cut: Epoch, epoch: int, k: int) -> list[Ids]:
        """This rank's positions with the window sorted by length, and dealt out micro-step by micro-step.

        Every rank so takes a piece of every length: they finish together.
        """
        assert self._group_by is not None
        positions = np.asarray(cut.window(k), dtype=np.int64)
        lengths = self._group_by[self._plan.ids(epoch, positions)]
        positions = positions[np.argsort(-lengths, kind="stable")]
        ranks = range(self._plan.world_size)
        sizes = np.array([[len(part) for part in cut.micro_batches(k, rank)] for rank in ranks])
        pieces = np.split(positions, np.cumsum(sizes.T.ravel())[:-1])
        return pieces[self._rank :: self._plan.world_size]


def padding_share(lengths: Ids, plan: Plan, *, grouped: bool, windows: int = 100) -> float:
    """Which share of the tokens is padding where micro-batches are padded to their longest; of the first windows."""
    real = padded = 0
    cut = plan.epoch(0)
    looked_at = range(min(windows, cut.windows_per_epoch))
    for rank in range(plan.world_size):
        steps = sum(bool(positions) for k in looked_at for positions in cut.micro_batches(k, rank))
        for ids in islice(MicroBatchIds(plan, rank, group_by=lengths if grouped else None), steps):
            real += int(lengths[ids].sum())
            padded += int(lengths[ids].max()) * len(ids)
    return 1 - real / padded
