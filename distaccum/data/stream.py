"""Loads windows from streams: one iterable per rank, of unknown and unequal lengths."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from time import perf_counter
from typing import Any

from torch import Tensor
from torch.utils.data import default_collate

from distaccum.data.counter import GlobalCounter
from distaccum.data.loader import Collate, WindowLoader
from distaccum.data.plan.batch import KEYWORDS
from distaccum.data.plan.resized import Resize
from distaccum.data.plan.stream import StreamPlan
from distaccum.data.window import MicroBatch, Window
from distaccum.distributed.random import keys_of
from distaccum.distributed.world import World
from distaccum.errors import DataError
from distaccum.losses.normalize import Counts


class IterableWindowLoader(WindowLoader):
    """The windows of a stream.

    Each rank whose stream has not ended fetches an equal part of the global batch. Where a stream ends within a window,
    the other ranks fetch the rest, so that every window but the last is full, and every item is used exactly once.

    Args:
        stream: this rank's samples, or micro-batches where ``plan.batched``; iterated once per epoch. Checkpoints keep
            its ``state_dict``, or its dataset's; without one a resumed run skips the items that were taken.
        plan: the sizes.
        world: this rank.
        collate: from samples to a batch; None for torch's ``default_collate``.
        seed: of the windows' keys, which depend on the rank: its stream is its own.
    """

    def __init__(
        self, stream: Iterable[Any], plan: StreamPlan, world: World, *, collate: Collate | None = None, seed: int = 0
    ) -> None:
        self._stream, self._plan, self._world, self._seed = stream, plan, world, seed
        self._collate: Callable[[list[Any]], Any] = collate or default_collate
        self._items: Iterator[Any] | None = None
        self._taken = 0  # items of this epoch
        self._next = (0, 0)  # the epoch and window that the open iterator yields next
        self._skip = 0  # items that the next iteration skips
        self._ended = [False] * world.size  # by rank
        self._last: tuple[int, Window] | None = None  # the last window, and its index
        self._resumed: dict[str, Any] | None = None  # a restored state that no window was taken from yet

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
        """See :class:`WindowLoader`. One small host all-reduce per window, and one more when a rank's stream ends."""
        index = start
        if self._last is not None and self._last[0] == start and self._next == (epoch, start + 1):
            yield self._last[1]  # it was abandoned, and a stream yields its items once
            index += 1
        items = self._open(epoch, index)
        while not all(self._ended):
            began = perf_counter()
            micro_batches: list[MicroBatch] = []
            ids: list[range] = []
            counts: dict[str, float] = {}
            samples = 0
            while (wanted := self._plan.wanted(samples)) and not all(self._ended):
                fresh, spans, found, more = self._round(items, wanted, counter, index)
                micro_batches += fresh
                ids += spans
                samples += more
                for name, count in found.items():
                    counts[name] = counts.get(name, 0.0) + count
            index += 1
            self._next = (epoch, index)
            if samples:
                waited = perf_counter() - began
                window = Window(
                    epoch=epoch,
                    samples=samples,
                    counts=counts,
                    micro_batches=micro_batches,
                    data_wait_s=waited,
                    ids=partial(iter, ids),
                    keys=keys_of([span.start for span in ids], self._seed, epoch, self._world.rank),
                )
                self._last = (index - 1, window)
                yield window
            if counter.stopping:
                return
        self._items, self._taken, self._ended = None, 0, [False] * self._world.size

    def _round(
        self, items: Iterator[Any], wanted: int, counter: GlobalCounter, turn: int
    ) -> tuple[list[MicroBatch], list[range], Counts, int]:
        """Fetches this rank's part of the ``wanted`` items.

        Returns:
            Its micro-batches, the items of each, and the counts and samples of all ranks.
        """
        quota = self._plan.quota(wanted, [not ended for ended in self._ended], self._world.rank, turn=turn)
        taken = list(islice(items, quota))
        size = 1 if self._plan.batched else self._plan.micro_batch_size
        cuts = range(0, len(taken), size)
        spans = [range(self._taken + i, self._taken + min(i + size, len(taken))) for i in cuts]
        self._taken += len(taken)
        if self._plan.batched:
            batches, samples = taken, sum(map(self._checked_size, taken))
        else:
            batches, samples = [self._collate(taken[i : i + size]) for i in cuts], len(taken)
        micro_batches = [counter.micro_batch(batch) for batch in batches]
        ends = [0.0] * self._world.size
        ends[self._world.rank] = float(len(taken) < quota)
        counts, (total, *ended) = counter.all_reduce(micro_batches, [samples, *ends])
        self._ended = [before or now > 0 for before, now in zip(self._ended, ended, strict=True)]
        return micro_batches, spans, counts, int(total)

    def _checked_size(self, batch: Any) -> int:
        size = batch_size(batch)
        if size > self._plan.micro_batch_size:
            problem = f"a batch of {size} samples, and the micro-batch size is {self._plan.micro_batch_size}"
            raise DataError(f"{problem}: load smaller batches, or raise it")
        return size

    def _open(self, epoch: int, start: int) -> Iterator[Any]:
        """The open iterator if it is at this window, else a new one from the start of the epoch."""
        if self._items is None or self._next != (epoch, start):
            _call_if_there(self._stream, "set_epoch", epoch)
            self._items = iter(self._stream)
            for _ in islice(self._items, self._skip):
                pass
            if self._resumed is None:
                self._taken, self._ended = 0, [False] * self._world.size
            self._skip, self._resumed = 0, None
        return self._items

    def state(self) -> dict[str, Any]:
        """The items taken of the epoch, the ranks whose streams have ended, and the stream's own state or None."""
        if self._resumed is not None:
            return self._resumed
        owner = _owner_of_state(self._stream) if self._items is not None else None  # between epochs there is no state
        stream = None if owner is None else owner.state_dict()
        return {"taken": self._taken, "ended": list(self._ended), "stream": stream}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restores :meth:`state`; a stream that saves no state skips the items that were taken."""
        owner = _owner_of_state(self._stream)
        if owner is not None and state["stream"] is not None:
            owner.load_state_dict(state["stream"])
        else:
            self._skip = int(state["taken"])
        self._taken, self._ended = int(state["taken"]), list(state["ended"])
        self._items, self._last, self._resumed = None, None, state


def batch_size(batch: Any) -> int:
    """The number of samples in a batch: the length of its first tensor (or list) in mappings, lists and tuples."""
    first = batch
    while not isinstance(first, Tensor):
        parts = list(first.values()) if hasattr(first, "values") else list(first)
        if not parts or isinstance(parts[0], int | float | str):
            return len(parts)
        first = parts[0]
    return len(first)


def _owner_of_state(stream: Any) -> Any:
    """The object whose ``state_dict`` is the stream's whole state; None where there is none.

    That is the stream itself, or the dataset of a DataLoader without worker processes.
    """
    if hasattr(stream, "state_dict"):
        return None if _has_shuffle_buffer(stream) else stream
    dataset = getattr(stream, "dataset", None)
    workers: int = getattr(stream, "num_workers", 0)
    if not hasattr(dataset, "state_dict") or workers or _has_shuffle_buffer(dataset):
        return None
    return dataset


def _has_shuffle_buffer(stream: Any) -> bool:
    """Whether ``stream`` is a Hugging Face stream with a shuffle buffer, whose contents its state leaves out."""
    part = getattr(stream, "_ex_iterable", None)
    while part is not None:
        if type(part).__name__ == "BufferShuffledExamplesIterable":
            return True
        part = getattr(part, "ex_iterable", None)
    return False


def _call_if_there(stream: Any, name: str, value: int) -> None:
    for owner in (stream, getattr(stream, "dataset", None)):
        if hasattr(owner, name):
            getattr(owner, name)(value)
            return
