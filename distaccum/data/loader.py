"""Loads windows of counted micro-batches, as the batch plan says."""

from __future__ import annotations

import hashlib
import random
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import accumulate, chain, count, islice, repeat
from multiprocessing.process import BaseProcess
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from distaccum.data import loading_processes
from distaccum.data.agreement import Agreement, Sketch, differing_item, refuse_other_data, same, sketch
from distaccum.data.batches import map_tensors
from distaccum.data.collate import FilledCollator, PadCollator, none_among
from distaccum.data.counter import GlobalCounter
from distaccum.data.loading_processes import SeededIds, WaitClock, note_memory, prefetch_factor, reading
from distaccum.data.packing import PackCollator
from distaccum.data.plan.batch import Epoch, Ids, Plan, Resize
from distaccum.data.plan.tokens import TokensOf
from distaccum.data.plan.units import UnitEpoch
from distaccum.data.spec import Ignored, MapDataset, WorkerOptions
from distaccum.data.window import MicroBatch, Window
from distaccum.distributed.random import RNGState, keys_of
from distaccum.distributed.world import World
from distaccum.errors import DataError, MisuseError
from distaccum.losses.normalize import SINGLE

# Of the samples that the ranks compare: how many, and how often one is loaded again that differs.
_COMPARED, _REPEATED = 4, 16

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
        workers: how samples are loaded.
        seed: of the windows' keys.
        filled_with: fills smaller micro-batches up, with rows that count nothing: ``DataSpec.ignored``.
    """

    def __init__(
        self,
        dataset: MapDataset,
        plan: Plan,
        world: World,
        *,
        collate: Collate | None = None,
        workers: WorkerOptions | None = None,
        seed: int = 0,
        filled_with: Ignored | None = None,
    ) -> None:
        assert len(dataset) == plan.samples
        self._dataset, self._plan, self._world, self._seed = dataset, plan, world, seed
        self._agreement = Agreement(world)
        # What decides which samples a window holds, beside the position: a short hash of each sample's length.
        self._lengths = getattr(plan, "lengths", None)
        self._options, self._collate, self._filled_with = workers or WorkerOptions(), collate, filled_with
        self._workers = self._options.num_workers
        self._filling_checked, self._repeats, self._clock = False, False, WaitClock(world.device)
        self._told: int | None = None  # the epoch that the dataset was told
        self._processes: list[BaseProcess] = []
        self._iteration = loading_processes.Iteration()
        seed_of_workers = plan.seed if self._options.seed is None else self._options.seed
        self._generator = generator_of(seed_of_workers, world)
        # Processes that persist go on with the next epoch; others are started again for each, as their user wants.
        self._goes_on = self._workers > 0 and self._options.persistent_workers and self._options.prefetch_windows > 0
        self._seeds_here = plan.has_units and not self._workers
        self._ids = MicroBatchIds(
            plan,
            world.rank,
            seeds=("loading", seed_of_workers, seed) if self._workers or self._seeds_here else None,
            seeds_here=self._seeds_here,
            goes_on=self._goes_on,
            tells=bool(loading_processes.told_of_epochs(dataset)),
        )
        self._loader, self._noted = self._make(), False
        # What is loaded ahead: its epoch and window, and whether this rank has had something of that epoch.
        self._next: tuple[tuple[int, int], Iterator[Any], bool] | None = None

    def _make(self) -> DataLoader[Any]:
        options, fills = self._options, self._filled_with
        return torch_loader(
            self._dataset,
            self._ids,
            self._world,
            collate=self._collate if fills is None else FilledCollator(self._collate, self._plan.rows, fills),
            workers=replace(options, prefetch_factor=prefetch_factor(options, self._plan.items_of_window)),
            generator=self._generator,
            persistent=options.persistent_workers,
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
        resized = self._plan.resized(change)
        if resized is None:
            what = f"set_global_batch_size({change.global_batch_size})"
            raise MisuseError(f"{what} where tokens= cuts the windows: make an Accumulator with global_batch_size=")
        self._plan = self._ids.plan = resized
        self._next = None
        needed = prefetch_factor(self._options, self._plan.items_of_window)
        rows = getattr(self._loader.collate_fn, "rows", None)
        if (needed or 0) > (self._loader.prefetch_factor or 0) or rows not in (None, self._plan.rows):
            self._loader = self._make()  # its processes are started with the next window

    def windows(self, epoch: int, start: int, counter: GlobalCounter) -> Iterator[Window]:
        """See :class:`WindowLoader`. One small host all-reduce per window.

        Before the first window the ranks compare their plans and a few samples: see :mod:`distaccum.data.agreement`.

        Raises:
            ConfigError: the ranks have other plans or positions; the same message on every rank.
            DataError: the ranks have other data, or the dataset's length has changed.
            PeerError: another rank could not load its part of a window, and raises why.
        """
        batches: Iterator[Any] | None = None
        has_some = False
        if self._next is not None and self._next[0] == (epoch, start):
            _, batches, has_some = self._next
        if not self._agreement.reached:
            batches = self._begin(epoch, start)
        cut = self._plan.epoch(epoch)
        for k in range(start, cut.windows_per_epoch):
            generators, self._next = RNGState.capture(), None
            self._clock.start()
            positions = self._ids.positions(cut, k)
            filled = len(positions)
            loaded: list[Any] = []
            micro_batches: list[MicroBatch] = []
            error: Exception | None = None
            try:
                if k == start:
                    self._begin_epoch(epoch)
                    self._check_filling(k, cut, epoch, counter)
                    self._check_repeats(k, cut, epoch)
                if batches is None:
                    self._ids.seek(epoch, start)
                    batches = self._start()
                loaded.extend(islice(batches, filled))
                expect_all(filled, len(loaded), f"window {k} of epoch {epoch}")
                positions = self._with_samples(loaded, positions, epoch)
                micro_batches = [counter.micro_batch(batch) for batch in loaded if batch is not None]
                has_some = has_some or filled > 0
                if self._seeds_here:
                    generators.restore()
            except Exception as problem:  # every rank has to learn of it, or it waits for this one
                error = self._explained(problem, f"window {k} of epoch {epoch}", epoch, positions[len(loaded) :])
            waited, device_waited = self._clock.stop()
            counts, _ = counter.all_reduce(micro_batches, error=error)
            if counter.stopping:  # the window is loaded again later, and its samples draw the same random numbers
                generators.restore()
                return
            dealt = cut if isinstance(cut, UnitEpoch) else None
            if self._workers and micro_batches and not self._noted:
                self._noted = True
                note_memory([m.batch for m in micro_batches], self._workers * (self._loader.prefetch_factor or 0))
            if self._goes_on and batches is not None:
                self._next = (epoch, k + 1), batches, has_some  # a loop that is left, and goes on here, finds them
            yield Window(
                epoch=epoch,
                samples=len(cut.window(k)),
                counts=counts if dealt is None else dealt.counts(k, counts),
                micro_batches=micro_batches,
                data_wait_s=waited,
                device_wait_s=device_waited,
                ids=partial(map, partial(self._ids.of, epoch), positions),
                keys=keys_of(_firsts(positions), self._seed, epoch),
                fetch=self._fetch,
                assignment=None if dealt is None else dealt.assignment(k),
                key_at=partial(self._key_at, positions, epoch),
                rows=partial(self._rows, positions),
            )
        if self._goes_on and batches is not None:
            self._next = ((epoch + 1, 0), batches, False) if has_some else None

    def _with_samples(self, loaded: Sequence[Any], positions: list[Ids | range], epoch: int) -> list[Ids | range]:
        """The positions of the micro-batches that hold samples: none is left of one whose samples are all None.

        Raises:
            DataError: the collation gave None for samples that are there, or where sums have a fixed order.
        """
        for batch, own in zip(loaded, positions, strict=True):
            if batch is None:
                generators = RNGState.capture()
                samples, _ = self._fetch(self._ids.of(epoch, own))
                generators.restore()
                if self._plan.has_units or any(sample is not None for sample in samples):
                    remedy = "let it return the batch that it made. Samples that are None may be left out"
                    fixed = ", but not with numerics=reproducible" if self._plan.has_units else ""
                    raise DataError(f"the collate function gave None for a batch: {remedy}{fixed}")
        return [own for batch, own in zip(loaded, positions, strict=True) if batch is not None]

    def _explained(self, problem: Exception, what: str, epoch: int, rest: Sequence[Ids | range]) -> Exception:
        """What is said of a ``problem`` with ``what``; ``rest`` of its positions were not loaded before it."""
        error = loading_processes.explain(problem, self._processes, what, self._world)
        if not isinstance(error, TypeError) or not rest:
            return error
        with suppress(Exception):  # it may be the dataset's own
            ids = self._ids.of(epoch, rest[0])
            samples, collate = self._fetch(ids)
            return none_among(samples, ids, collate) or error
        return error

    def _key_at(self, positions: Sequence[Ids | range], epoch: int, i: int, place: int) -> int:
        last = len(positions[i]) - 1  # rows that fill a micro-batch up count nothing, and draw what they like
        return keys_of([int(positions[i][min(place, last)])], self._seed, epoch)[0]

    def _rows(self, positions: Sequence[Ids | range], i: int) -> int | None:
        collate = self._loader.collate_fn
        if isinstance(collate, PackCollator):
            return None
        return collate.rows if isinstance(collate, FilledCollator) else len(positions[i])

    def _tell(self, epoch: int) -> None:
        """Tells this process's dataset its epoch, before others are forked; those that persist are told by the ids."""
        if self._told != epoch:
            loading_processes.tell_epoch(self._dataset, epoch)
            self._told = epoch

    def _start(self) -> Iterator[Any]:
        batches = self._iteration.begin(self._loader)
        self._processes = loading_processes.children() if self._workers else []
        return batches

    def _fetch(self, ids: Sequence[int]) -> tuple[list[Any], Collate]:
        assert self._loader.collate_fn is not None
        return next(reading(self._dataset, [list(ids)], list, self._options)), self._loader.collate_fn

    def _begin(self, epoch: int, start: int) -> Iterator[Any]:
        """The batches from window ``start`` on, after the ranks have compared what they are about to train on."""
        samples = sorted({i * (self._plan.samples - 1) // (_COMPARED - 1) for i in range(_COMPARED)})
        self._ids.seek(epoch, start, first=samples)
        error: Exception | None = None
        batches: Iterator[Any] = iter(())
        sketches: list[Sketch | None] = []
        try:
            self._tell(epoch)
            batches = self._start()
            sketches = [self._sketch_of_next(batches) for _ in samples]
        except Exception as problem:
            error = problem
        gathered = self._agreement.on(self._facts(epoch, start), sketches, error)
        differing = differing_item(gathered)
        if differing is None:
            return batches
        number, rank = differing
        # Samples that are random, as augmented ones are, differ on one rank, too.
        self._ids.seek(epoch, start, first=[samples[number]] * _REPEATED)
        batches = self._start()
        first, *others = [self._sketch_of_next(batches) for _ in range(_REPEATED)]
        varies = any(same(first, other) is not True for other in others)
        if not self._world.all_reduce_max_host([varies])[0]:
            refuse_other_data(samples[number], rank)
        return batches

    def _facts(self, epoch: int, start: int) -> dict[str, Any]:
        facts: dict[str, Any] = {"data": "a map-style dataset", **self.position, "epoch": epoch, "window": start}
        if self._plan.seed is None:
            facts["seed"] = "none, as nothing is shuffled,"
        if self._lengths is not None:
            facts["lengths"] = f"{zlib.crc32(np.ascontiguousarray(self._lengths).tobytes()):08x} (a hash)"
            facts["micro_batch_size"] = self._plan.micro_batch_size
        return facts | self._plan.limit_of_tokens | getattr(self._plan, "facts", {})

    def _sketch_of_next(self, batches: Iterator[Any]) -> Sketch | None:
        """The next batch's numbers; None where it cannot be loaded alone. The model's random numbers are left alone."""
        generators = RNGState.capture()
        torch.default_generator.manual_seed(0)  # of the host alone
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002  what users' code draws from
        try:
            return sketch(next(batches))
        except Exception:  # the window that it is in says why
            return None
        finally:
            generators.restore()

    def _check_filling(self, k: int, cut: Epoch, epoch: int, counter: GlobalCounter) -> None:
        """Compares the count of this rank's first sample of a window, alone and among rows that count nothing; once."""
        collate = self._loader.collate_fn
        if self._filling_checked or not isinstance(collate, FilledCollator):
            return
        generators = RNGState.capture()
        try:
            first = next(self._ids.of_window(cut, epoch, k), [])[:1]
            samples = next(reading(self._dataset, [first], list, self._options)) if first else []
            counts = [counter.micro_batch(of(samples)).counts for of in (collate.bare, collate) if samples]
        finally:
            generators.restore()
        self._filling_checked = bool(counts)
        if counts and counts[0] != counts[1]:
            said = " and ".join(str(one.get(SINGLE, one)) for one in counts)
            problem = f"a sample counts {said} without and with the rows that fill its micro-batch"
            raise DataError(f"{problem}: count the labels that are not ignored, or leave pad_rows out")

    def _check_repeats(self, k: int, cut: Epoch, epoch: int) -> None:
        """Loads this rank's first unit of a window twice, with the same random numbers; once.

        Raises:
            DataError: it is another one the second time.
        """
        if self._repeats or not self._plan.has_units:
            return
        ids = next(self._ids.of_window(cut, epoch, k), [])
        if not ids:
            return
        self._repeats = True
        generators = RNGState.capture()
        # Whoever loads it is seeded each time: this process, or the loading process that gets it.
        twice: Any = (SeededIds(SeededIds.here(ids, 0), 0) for _ in range(2))
        collate = self._loader.collate_fn
        assert collate is not None
        found = list(reading(self._dataset, twice, lambda samples: _tensors(collate(samples)), self._options))
        generators.restore()
        first, second = found
        if len(first) != len(second) or not all(map(torch.equal, first, second)):
            problem = "a sample is another one when it is loaded a second time, with the same random numbers"
            remedy = "draw from the global generators of torch, NumPy or Python, and keep none in the dataset"
            raise DataError(f"{problem}, so that it would depend on what its rank has loaded before: {remedy}")

    def _begin_epoch(self, epoch: int) -> None:
        self._tell(epoch)
        if len(self._dataset) != self._plan.samples:
            problem = f"the dataset holds {len(self._dataset)} samples now, and held {self._plan.samples} at the start"
            raise DataError(f"{problem}: windows are made of those. Keep its length, or give it as a stream")


def torch_loader(
    dataset: MapDataset,
    ids: Iterable[list[int]],
    world: World,
    *,
    collate: Collate | None,
    workers: WorkerOptions,
    generator: torch.Generator,
    persistent: bool,
) -> DataLoader[Any]:
    """Torch's ``DataLoader`` of the batches ``ids``, as ``workers`` says; pinned where this rank computes on a GPU.

    Args:
        dataset: map-style samples.
        ids: the samples of each batch; iterated anew by each iteration of the loader.
        world: this rank.
        collate: from samples to a batch; None for torch's ``default_collate``.
        workers: how samples are loaded.
        generator: of the workers' seeds: see :func:`generator_of`.
        persistent: whether workers outlive an iteration.
    """
    return DataLoader(
        cast("Dataset[Any]", dataset),  # torch names its base class, and uses len() and [index] only
        batch_sampler=cast(Any, ids),
        collate_fn=collate,
        num_workers=workers.num_workers,
        persistent_workers=workers.num_workers > 0 and persistent,
        worker_init_fn=loading_processes.WorkerInit(workers.worker_init_fn),
        multiprocessing_context=workers.multiprocessing_context,
        timeout=workers.timeout,
        prefetch_factor=workers.prefetch_factor,
        pin_memory=world.device.type != "cpu" and workers.pin_memory is not False,
        generator=generator,
    )


def generator_of(seed: int | None, world: World) -> torch.Generator:
    """Of a rank's ``DataLoader``: it draws none of the model's random numbers, and ranks' workers get other seeds."""
    digest = hashlib.blake2b(f"{seed}/{world.rank}".encode(), digest_size=7).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest))


def expect_all(given: int, found: int, what: str) -> None:
    """Raises DataError if torch's ``DataLoader`` has ended before it made batches of all samples that it was given."""
    if found < given:
        why = "the dataset or the collate function raises StopIteration, as next() does where an iterator has no more"
        raise DataError(f"{what} ended after {found} batches, and there are more: {why}")


def _firsts(positions: Sequence[Ids | range]) -> list[int]:
    """The position in the epoch's order of the first sample of each micro-batch."""
    return [int(own[0]) for own in positions]


class MicroBatchIds:
    """The sample ids of one rank's micro-batches, window after window: a batch sampler for torch's ``DataLoader``.

    Args:
        plan: the slicing.
        rank: whose micro-batches.
        seeds: make each micro-batch's ids seed the loading process that gets them, with the epoch and its place in it.
        seeds_here: whether that is this process, which loads each micro-batch when it has its ids.
        goes_on: whether an iteration goes on with the next epoch, without an end.
        tells: whether the ids tell the loading process that gets them their epoch.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        *,
        seeds: tuple[object, ...] | None = None,
        seeds_here: bool = False,
        goes_on: bool = False,
        tells: bool = False,
    ) -> None:
        self.plan, self._rank, self._seeds, self._goes_on = plan, rank, seeds, goes_on
        self._seeds_here, self._tells = seeds_here, tells
        self.seek(0, 0)

    def seek(self, epoch: int, start: int, *, first: Sequence[int] = ()) -> None:
        """Sets where the next iteration begins: after the samples ``first``, each in a batch of its own."""
        self._epoch, self._start, self._first = epoch, start, first

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([sample] for sample in self._first)
        start, has_some = self._start, True
        for epoch in count(self._epoch) if self._goes_on else (self._epoch,):
            if not has_some:  # this rank may have nothing in any epoch
                return
            cut, has_some = self.plan.epoch(epoch), False
            for k in range(start, cut.windows_per_epoch):
                ids = self.of_window(cut, epoch, k)
                for micro_batch in ids if self._seeds is None else self._seeded(ids, cut, epoch, k):
                    has_some = True
                    yield micro_batch
            start = 0

    def _seeded(self, ids: Iterator[list[int]], cut: Epoch, epoch: int, k: int) -> Iterator[list[int]]:
        assert self._seeds is not None
        keys = keys_of(_firsts(self.positions(cut, k)), *self._seeds, epoch)
        if self._seeds_here:
            return map(SeededIds.here, ids, keys)
        return map(SeededIds, ids, keys, repeat(epoch if self._tells else None))

    def of_window(self, cut: Epoch, epoch: int, k: int) -> Iterator[list[int]]:
        """The ids of window ``k`` of the epoch that ``cut`` slices, one list per micro-batch."""
        positions = self.positions(cut, k)
        if not positions:
            return iter(())
        # an order that is computed position by position costs nearly as much for one as for a window's
        ids, ends = self.plan.ids(epoch, np.concatenate(positions)).tolist(), accumulate(map(len, positions))
        return iter([ids[end - len(own) : end] for own, end in zip(positions, ends, strict=True)])

    def of(self, epoch: int, positions: Ids | range) -> list[int]:
        """The ids at these positions in an epoch's order."""
        ids: list[int] = self.plan.ids(epoch, np.asarray(positions, dtype=np.int64)).tolist()
        return ids

    def positions(self, cut: Epoch, k: int) -> list[Ids | range]:
        """The positions in the epoch's order of each micro-batch of window ``k`` that has any."""
        return [positions for positions in cut.micro_batches(k, self._rank) if len(positions)]


def _tensors(batch: Any) -> list[torch.Tensor]:
    """Those of a batch, with NaN as numbers."""
    found: list[torch.Tensor] = []
    map_tensors(batch, lambda tensor: found.append(tensor.nan_to_num() if tensor.is_floating_point() else tensor))
    return found


def tokens_of(collate: Collate | None) -> TokensOf:
    """From the lengths of a micro-batch's samples to its tokens, padding included, as ``collate`` makes it.

    A function that does not say is taken to pad to the longest of the micro-batch.
    """
    return getattr(collate, "tokens_of", None) or PadCollator(()).tokens_of


def padding_share(
    lengths: Ids, plan: Plan, *, grouped: bool, collate: Collate | None = None, windows: int = 100
) -> float:
    """The share of padding among the tokens of the first windows, where ``collate`` makes their micro-batches."""
    real = padded = 0
    plan = plan.grouped_by_length(lengths if grouped else None)
    cut, in_memory = plan.epoch(0), tokens_of(collate)
    first = range(min(windows, cut.windows_per_epoch))
    for rank in range(plan.world_size):
        of_rank = MicroBatchIds(plan, rank)
        for ids in chain.from_iterable(of_rank.of_window(cut, 0, k) for k in first):
            real += int(lengths[ids].sum())
            padded += in_memory(lengths[ids])
    return 1 - real / padded
