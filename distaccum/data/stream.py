"""Loads windows from streams: one iterable per rank, of unknown and unequal lengths."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch.utils.data import default_collate

from distaccum.config.checks import require
from distaccum.data import loading_processes
from distaccum.data.adapters import is_hugging_face, nested
from distaccum.data.agreement import Agreement, Sketch, refuse_equal_streams, refuse_equal_workers, same, sketch
from distaccum.data.batch_size import BatchSize
from distaccum.data.collate import none_among
from distaccum.data.counter import GlobalCounter
from distaccum.data.loader import Collate, WindowLoader
from distaccum.data.loading_processes import WaitClock
from distaccum.data.plan.batch import KEYWORDS, Resize
from distaccum.data.plan.stream import StreamPlan
from distaccum.data.window import MicroBatch, Window
from distaccum.distributed.random import RNGState, keys_of
from distaccum.distributed.world import World
from distaccum.errors import DataError
from distaccum.losses.normalize import Counts

_COMPARED = 4  # items of an epoch, the first ones, that a resumed run compares with those that it takes again
_MOST_EMPTY = 1000  # rounds in a row in which no rank has a sample


class IterableWindowLoader(WindowLoader):
    """The windows of a stream.

    Each rank whose stream has not ended fetches an equal part of the global batch. Where a stream ends within a window,
    the other ranks fetch the rest, so that every window but the last is full, and every item is used exactly once.

    Args:
        stream: this rank's samples, or micro-batches where ``plan.batched``; iterated once per epoch. Checkpoints keep
            its ``state_dict``, or its dataset's; without one, or with a shuffle buffer anywhere in it, whose contents
            no state holds, a resumed run takes the epoch's items again up to where it was.
        plan: the sizes.
        world: this rank.
        collate: from samples to a batch; None for torch's ``default_collate``.
        batch_size: from a micro-batch to the number of its samples; None to measure it.
        may_repeat: whether ranks and workers may yield the same items.
        seed: of the windows' keys, which depend on the rank: its stream is its own.

    Raises:
        ConfigError: its loading processes persist, and ``set_epoch`` does not reach their copies of the dataset.
    """

    def __init__(
        self,
        stream: Iterable[Any],
        plan: StreamPlan,
        world: World,
        *,
        collate: Collate | None = None,
        batch_size: Callable[[Any], int] | None = None,
        may_repeat: bool = False,
        seed: int = 0,
    ) -> None:
        self._stream, self._plan, self._world, self._seed = stream, plan, world, seed
        dataset = getattr(stream, "dataset", None)
        told = loading_processes.told_of_epochs(dataset)
        if getattr(stream, "persistent_workers", False) and told:
            remedy = "Leave it out: processes are then started for each epoch, after set_epoch()"
            problem = f"set_epoch() of {type(told[0]).__name__} does not reach the copies in processes that persist"
            require(all(map(is_hugging_face, told)), "loader", "persistent_workers=True", problem, remedy)
        self._clock = WaitClock(world.device)
        self._size = BatchSize(plan.micro_batch_size, batch_size)
        self._may_repeat = may_repeat
        self._agreement = Agreement(world)
        workers = _workers_of(stream)
        self._workers = 0 if may_repeat or workers < 2 else workers  # noqa: PLR2004  whose first items are compared
        self._of_workers: list[Sketch | None] = []
        self._begun = False  # whether an item was taken: an iterator cannot begin again
        self._collate: Callable[[list[Any]], Any] = collate or default_collate
        self._items: Iterator[Any] | None = None
        self._processes: list[BaseProcess] = []
        self._iteration = loading_processes.Iteration()
        self._to_open: int | None = None  # the epoch that the next item opens
        self._taken = 0  # items of this epoch
        self._next = (0, 0)  # the epoch and window that the open iterator yields next
        self._skip = 0  # items that the next iteration skips
        self._ended = [False] * world.size  # by rank
        self._last: tuple[int, Window] | None = None  # the last window, and its index
        self._resumed: dict[str, Any] | None = None  # a restored state that no window was taken from yet
        self._began: dict[str, Any] = {}  # with what this epoch has: generators, and its first items in short

    @property
    def position(self) -> dict[str, Any]:
        """The plan's numbers, the world size among them."""
        return self._plan.position

    def resize(self, change: Resize) -> None:
        """See :class:`WindowLoader`: the stream goes on where it is.

        Raises:
            ConfigError: a size that the stream's micro-batches cannot make up.
        """
        self._plan = replace(self._plan, global_batch_size=change.global_batch_size, names=KEYWORDS)

    def windows(self, epoch: int, start: int, counter: GlobalCounter) -> Iterator[Window]:
        """See :class:`WindowLoader`. One small host all-reduce per window, and one more when a rank's stream ends.

        Before the first window the ranks compare their plans and first items: see :mod:`distaccum.data.agreement`.

        Raises:
            ConfigError: the ranks have other plans or positions; the same message on every rank.
            DataError: the ranks' streams are the same, or hold nothing but empty batches or nothing at all; an iterator
                that has begun is to begin again.
            PeerError: another rank could not load its part of a window, and raises why.
        """
        index = start
        if self._last is not None and self._last[0] == start and self._next == (epoch, start + 1):
            yield self._last[1]  # it was abandoned, and a stream yields its items once
            index += 1
        if self._items is None or self._next != (epoch, index):
            self._to_open = epoch
            self._ended = [False] * self._world.size if self._resumed is None else list(self._resumed["ended"])
        gave = index > 0
        while not all(self._ended):
            self._clock.start()
            micro_batches: list[MicroBatch] = []
            ids: list[range] = []
            sizes: list[int] = []
            counts: dict[str, float] = {}
            samples = empty = 0
            while (wanted := self._plan.wanted(samples)) and not all(self._ended):
                fresh, spans, own, found, more = self._round(wanted, counter, epoch, index)
                micro_batches += fresh
                ids += spans
                sizes += own
                samples += more
                for name, count in found.items():
                    counts[name] = counts.get(name, 0.0) + count
                empty = 0 if more else empty + 1
                if empty >= _MOST_EMPTY:
                    raise DataError(f"the streams yielded nothing but empty batches {_MOST_EMPTY} times in a row")
            index += 1
            self._next = (epoch, index)
            gave = gave or samples > 0
            if samples:
                waited, device_waited = self._clock.stop()
                window = Window(
                    epoch=epoch,
                    samples=samples,
                    counts=counts,
                    micro_batches=micro_batches,
                    data_wait_s=waited,
                    device_wait_s=device_waited,
                    ids=partial(iter, ids),
                    keys=keys_of([span.start for span in ids], self._seed, epoch, self._world.rank),
                    key_at=None if self._plan.batched else partial(self._key_at, ids, epoch),
                    rows=sizes.__getitem__,
                )
                self._last = (index - 1, window)
                yield window
            if counter.stopping:
                return
        if self._to_open is not None:  # the state was saved at the end of an epoch
            self._open()
        self._items, self._taken, self._ended, self._began = None, 0, [False] * self._world.size, {}
        if not gave:
            raise DataError(f"epoch {epoch}: the streams of all {self._world.size} ranks are empty")

    def _round(
        self, wanted: int, counter: GlobalCounter, epoch: int, turn: int
    ) -> tuple[list[MicroBatch], list[range], list[int], Counts, int]:
        """Fetches this rank's part of the ``wanted`` items of window ``turn``.

        Returns:
            Its micro-batches, the items of each and their samples, and the counts and samples of all ranks.
        """
        quota = self._plan.quota(wanted, [not ended for ended in self._ended], self._world.rank, turn=turn)
        taken: list[Any] = []
        batches: list[tuple[Any, range, int]] = []
        micro_batches: list[MicroBatch] = []
        error: Exception | None = None
        try:
            taken = list(islice(self._open(), quota))
            if taken and not self._taken:
                self._began["first"] = list(map(sketch, taken[:_COMPARED]))
            batches = self._batches(taken)
            micro_batches = [counter.micro_batch(batch) for batch, _, _ in batches]
            self._compare_workers(taken)
        except Exception as problem:  # every rank has to learn of it, or it waits for this one
            error = loading_processes.explain(problem, self._processes, f"window {turn} of epoch {epoch}", self._world)
        if not self._agreement.reached:
            facts = {"data": "a stream", **self.position, "epoch": epoch, "window": turn}
            gathered = self._agreement.on(facts, list(map(sketch, taken)), error)
            if not self._may_repeat:
                refuse_equal_streams(gathered)
        ends = [0.0] * self._world.size
        ends[self._world.rank] = float(len(taken) < quota)
        samples = sum(size for _, _, size in batches)
        counts, (total, *ended) = counter.all_reduce(micro_batches, [samples, *ends], error=error)
        self._ended = [before or now > 0 for before, now in zip(self._ended, ended, strict=True)]
        return micro_batches, [span for _, span, _ in batches], [size for *_, size in batches], counts, int(total)

    def _key_at(self, spans: Sequence[range], epoch: int, i: int, place: int) -> int:
        return keys_of([spans[i].start + place], self._seed, epoch, self._world.rank)[0]

    def _batches(self, taken: list[Any]) -> list[tuple[Any, range, int]]:
        """The micro-batches of the items that were taken, their numbers in the stream, and their samples.

        Batches of no sample add nothing, and are left out.
        """
        step = 1 if self._plan.batched else self._plan.micro_batch_size
        found: list[tuple[Any, range, int]] = []
        for i in range(0, len(taken), step):
            part = taken[i : i + step]
            span = range(self._taken + i, self._taken + i + len(part))
            batch = part[0] if self._plan.batched else self._collated(part, span)
            if batch is None and not self._plan.batched and all(sample is None for sample in part):
                continue
            if batch is None:
                who = "stream yielded" if self._plan.batched else "collate function gave"
                raise DataError(f"the {who} None for a batch: let it return the batch, or leave the batch out")
            size = self._checked_size(batch) if self._plan.batched else len(part)
            if size:
                found.append((batch, span, size))
        self._taken += len(taken)
        return found

    def _collated(self, part: list[Any], numbers: range) -> Any:
        try:
            return self._collate(part)
        except TypeError as error:
            raise none_among(part, numbers, self._collate) or error from None

    def _compare_workers(self, taken: list[Any]) -> None:
        if self._workers and taken:
            self._of_workers += map(sketch, taken[: self._workers - len(self._of_workers)])
            if len(self._of_workers) == self._workers:
                workers, self._workers = self._workers, 0
                refuse_equal_workers(self._of_workers, workers)

    def _checked_size(self, batch: Any) -> int:
        size = self._size(batch)
        if size > self._plan.micro_batch_size:
            problem = f"a batch of {size} samples, and the micro-batch size is {self._plan.micro_batch_size}"
            raise DataError(f"{problem}: load smaller batches, or raise it")
        return size

    def _open(self) -> Iterator[Any]:
        """The open iterator, or a new one from the start of the epoch that is to be opened."""
        if self._to_open is not None:
            epoch, self._to_open = self._to_open, None
            loading_processes.tell_epoch(self._stream, epoch)
            if self._resumed is None:
                self._taken, self._began = 0, {}
            generators, own = RNGState.capture(), getattr(self._stream, "generator", None)
            again, own = bool(self._began), own if isinstance(own, torch.Generator) else None
            if again:  # what the stream draws when an epoch begins, such as its order, it draws again
                RNGState.from_json(self._began["random"]).restore()
                if own is not None and self._began["own"] is not None:
                    own.set_state(self._began["own"])
            else:
                self._began = {"random": generators.to_json(), "own": None if own is None else own.get_state()}
            items = self._iteration.begin(self._stream)
            self._processes = loading_processes.children()
            begun = self._begun or (self._skip > 0 and _has_begun(items))
            if begun and items is self._stream:
                remedy = "Give an object whose __iter__ begins again, such as a class with a generator for __iter__"
                raise DataError(f"the stream is an iterator, which yields its items once, and has begun. {remedy}")
            self._items = items
            self._take_again()
            if again:
                generators.restore()
            self._skip, self._resumed, self._begun = 0, None, True
        assert self._items is not None
        return self._items

    def _take_again(self) -> None:
        """Takes the items that a resumed run took of the epoch before.

        Raises:
            DataError: they are other ones now.
        """
        assert self._items is not None
        first = self._began.get("first", ())
        again = [sketch(item) for item in islice(self._items, min(self._skip, len(first)))]
        if any(same(*pair) is False for pair in zip(again, first, strict=False)):
            problem = "the stream begins its epoch with other items than before the resume, whose place is unknown then"
            remedy = "Let its order depend on a stated seed and the epoch alone, as shuffle(seed=0) does"
            raise DataError(f"{problem}. {remedy}; or begin anew from the weights with init_from")
        for _ in islice(self._items, self._skip - len(again)):
            pass

    def state(self) -> dict[str, Any]:
        """The items taken of the epoch, the ranks whose streams have ended, and the stream's own state or None."""
        if self._resumed is not None:
            return self._resumed
        owner = _owner_of_state(self._stream) if self._items is not None else None  # between epochs there is no state
        stream = None if owner is None else owner.state_dict()
        place = {"taken": self._taken, "ended": list(self._ended), "stream": stream}
        return place | {"began": dict(self._began), "workers": _workers_of(self._stream)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restores :meth:`state`; a stream that saves no state takes the items again that were taken.

        Raises:
            ConfigError: in the middle of an epoch, with another number of loading processes.
        """
        now = _workers_of(self._stream)
        before = state.get("workers", now)
        remedy = f"Continue with {before}, or begin anew from the weights with init_from"
        problem = f"the epoch was begun with {before}, and the order of a stream's items depends on it"
        require(before == now or not state["taken"], "num_workers", now, problem, remedy)
        owner = _owner_of_state(self._stream)
        if owner is not None and state["stream"] is not None:
            owner.load_state_dict(state["stream"])
        else:
            self._skip = int(state["taken"])
        self._taken, self._ended = int(state["taken"]), list(state["ended"])
        self._items, self._last, self._resumed, self._began = None, None, state, state.get("began", {})


def _has_begun(items: Any) -> bool:
    """Whether a generator has yielded; of any other iterator nobody knows."""
    return inspect.isgenerator(items) and inspect.getgeneratorstate(items) != inspect.GEN_CREATED


def _workers_of(stream: Any) -> int:
    """The loading processes of a ``DataLoader``."""
    return int(getattr(stream, "num_workers", 0))


def _owner_of_state(stream: Any) -> Any:
    """The object whose ``state_dict`` is the stream's whole state; None where there is none.

    That is the stream itself, or the dataset of a DataLoader without worker processes. A shuffle buffer of Hugging
    Face leaves its contents out of its state, whatever stands above it.
    """
    if any(type(part).__name__ == "BufferShuffledExamplesIterable" for part in nested(stream)):
        return None
    if hasattr(stream, "state_dict"):
        return stream
    dataset = getattr(stream, "dataset", None)
    return dataset if hasattr(dataset, "state_dict") and not _workers_of(stream) else None
