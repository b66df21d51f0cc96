"""Loads windows of counted micro-batches, as the batch plan says."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from time import perf_counter
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from distaccum.data.counter import GlobalCounter
from distaccum.data.plan.batch import BatchPlan, Epoch, Ids, Plan
from distaccum.data.plan.resized import Resize, ResizedPlan
from distaccum.data.spec import MapDataset
from distaccum.data.window import Window
from distaccum.distributed.random import RNGState, keys_of
from distaccum.distributed.signals import ignore_stop_signals
from distaccum.distributed.world import World
from distaccum.errors import MisuseError

Collate = Callable[[list[Any]], Any]


class WindowLoader(ABC):
    """A source of counted windows. A user's subclass of it is used unchanged."""

    @property
    @abstractmethod
    def position(self) -> dict[str, Any]:
        """The numbers that give a window's index its meaning; a checkpoint fits only where they are the same."""

    @abstractmethod
    def windows(self, epoch: int, start: int, counter: GlobalCounter) -> Iterator[Window]:
        """The windows of an epoch from ``start`` on, counted over all ranks; ends early where ``counter.stopping``."""

    def state(self) -> Any:
        """This rank's state after the last window that was yielded; None where the position says everything."""
        return None

    def load_state(self, state: Any) -> None:  # noqa: B027  not abstract: the position may say everything
        """Restores :meth:`state`, before :meth:`windows`."""

    def resize(self, change: Resize) -> None:
        """Changes the global batch of the windows from ``change.window`` of ``change.epoch`` on, before these.

        Raises:
            MisuseError: this loader cuts its windows itself.
        """
        what = f"set_global_batch_size({change.global_batch_size}) with a {type(self).__name__}"
        raise MisuseError(f"{what}, which cuts its windows itself: give the dataset, or override its resize()")


class MapWindowLoader(WindowLoader):
    """The windows of a map-style dataset.

    Torch's ``DataLoader`` fetches the samples, with its workers, pinning and collation. The plan alone decides which
    samples are fetched and how they are grouped.

    Args:
        dataset: map-style samples; its length is the plan's ``samples``.
        plan: the slicing.
        world: this rank.
        collate: from samples to a batch; None for torch's ``default_collate``.
        num_workers: loading processes of this rank.
        group_by: the length of each sample: the micro-batches of a window then hold samples of similar length.
        seed: of the windows' keys.
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
        seed: int = 0,
    ) -> None:
        assert len(dataset) == plan.samples
        self._plan, self._world, self._seed = plan, world, seed
        self._ids = MicroBatchIds(plan, world.rank, group_by=group_by)
        # A generator of the loader's own draws none of the model's random numbers; each rank's workers get other seeds.
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

    def resize(self, change: Resize) -> None:
        """See :class:`WindowLoader`.

        Raises:
            ConfigError: the global batch is smaller than the micro-batch.
            MisuseError: the windows are cut by a budget of tokens.
        """
        if not isinstance(self._plan, BatchPlan):
            what = f"set_global_batch_size({change.global_batch_size})"
            raise MisuseError(f"{what} where tokens= cuts the windows: make an Accumulator with global_batch_size=")
        plan = self._plan
        self._plan = self._ids.plan = ResizedPlan(
            samples=plan.samples,
            global_batch_size=change.global_batch_size,
            micro_batch_size=plan.micro_batch_size,
            world_size=plan.world_size,
            seed=plan.seed,
            since=change,
        )

    def windows(self, epoch: int, start: int, counter: GlobalCounter) -> Iterator[Window]:
        """See :class:`WindowLoader`. One small host all-reduce per window."""
        self._ids.seek(epoch, start)
        batches, cut = iter(self._loader), self._plan.epoch(epoch)
        for k in range(start, cut.windows_per_epoch):
            began, generators = perf_counter(), RNGState.capture()
            filled = sum(1 for positions in cut.micro_batches(k, self._world.rank) if positions)
            micro_batches = [counter.micro_batch(batch) for batch in islice(batches, filled)]
            waited = perf_counter() - began
            counts, _ = counter.all_reduce(micro_batches)
            if counter.stopping:  # the window is loaded again later, and its samples draw the same random numbers
                generators.restore()
                return
            yield Window(
                epoch=epoch,
                samples=len(cut.window(k)),
                counts=counts,
                micro_batches=micro_batches,
                data_wait_s=waited,
                ids=partial(self._ids.of_window, cut, epoch, k),
                keys=keys_of(self._ids.firsts(cut, epoch, k), self._seed, epoch),
            )


class MicroBatchIds:
    """The sample ids of one rank's micro-batches, window after window: a batch sampler for torch's ``DataLoader``."""

    def __init__(self, plan: Plan, rank: int, *, group_by: Ids | None = None) -> None:
        self.plan, self._rank, self._group_by = plan, rank, group_by
        self.seek(0, 0)

    def seek(self, epoch: int, start: int) -> None:
        """Sets where the next iteration begins."""
        self._epoch, self._start = epoch, start

    def __iter__(self) -> Iterator[list[int]]:
        cut = self.plan.epoch(self._epoch)
        for k in range(self._start, cut.windows_per_epoch):
            yield from self.of_window(cut, self._epoch, k)

    def of_window(self, cut: Epoch, epoch: int, k: int) -> Iterator[list[int]]:
        """The ids of window ``k`` of the epoch that ``cut`` slices, one list per micro-batch."""
        for positions in (
            self._arranged(cut, epoch, k) if self._group_by is not None else cut.micro_batches(k, self._rank)
        ):
            if len(positions):
                yield self.plan.ids(epoch, np.asarray(positions, dtype=np.int64)).tolist()

    def firsts(self, cut: Epoch, epoch: int, k: int) -> list[int]:
        """The position in the epoch's order of the first sample of each micro-batch of window ``k``."""
        parts = self._arranged(cut, epoch, k) if self._group_by is not None else cut.micro_batches(k, self._rank)
        return [int(positions[0]) for positions in parts if len(positions)]

    def _arranged(self, cut: Epoch, epoch: int, k: int) -> list[Ids]:
        """This rank's positions: the window is sorted by length, and dealt to the ranks micro-step by micro-step.

        So every rank gets some of every length, and all finish at about the same time.
        """
        assert self._group_by is not None
        positions = np.asarray(cut.window(k), dtype=np.int64)
        lengths = self._group_by[self.plan.ids(epoch, positions)]
        positions = positions[np.argsort(-lengths, kind="stable")]
        ranks = range(self.plan.world_size)
        sizes = np.array([[len(part) for part in cut.micro_batches(k, rank)] for rank in ranks])
        pieces = np.split(positions, np.cumsum(sizes.T.ravel())[:-1])
        return pieces[self._rank :: self.plan.world_size]


def padding_share(lengths: Ids, plan: Plan, *, grouped: bool, windows: int = 100) -> float:
    """The share of padding among the tokens of the first windows, where micro-batches are padded to their longest."""
    real = padded = 0
    cut = plan.epoch(0)
    first = range(min(windows, cut.windows_per_epoch))
    for rank in range(plan.world_size):
        steps = sum(bool(positions) for k in first for positions in cut.micro_batches(k, rank))
        for ids in islice(MicroBatchIds(plan, rank, group_by=lengths if grouped else None), steps):
            real += int(lengths[ids].sum())
            padded += int(lengths[ids].max()) * len(ids)
    return 1 - real / padded
