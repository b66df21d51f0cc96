"""Windows that arrive at run time, as rollouts do: other numbers and sizes of micro-batches on each rank each time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from distaccum.config.checks import REPRODUCIBLE
from distaccum.data.batch_size import BatchSize
from distaccum.data.counter import GlobalCounter
from distaccum.data.loader import WindowLoader
from distaccum.data.window import MicroBatch, Window
from distaccum.distributed.random import keys_of
from distaccum.distributed.world import World
from distaccum.errors import ConfigError, DataError, MisuseError
from distaccum.losses.normalize import Count

_ANY = 2**31  # samples: a micro-batch is as large as it comes


class NothingArrivedError(Exception):
    """The window before counts nothing on any rank, and no other one is there yet."""


class ArrivingWindows(WindowLoader):
    """The windows of one epoch without an end, each of what :meth:`take` was given: there is no plan.

    Args:
        world: this rank.
        seed: of the windows' keys, which depend on the rank: what arrives there is its own.
        planned: whether sums have a fixed order, which only a plan gives.
    """

    def __init__(self, world: World, *, seed: int, planned: bool) -> None:
        self._world, self._seed, self._planned, self._size = world, seed, planned, BatchSize(_ANY)
        self._arrived: Iterable[Any] | None = None
        self._count: Count | None = None

    @property
    def position(self) -> dict[str, Any]:
        """Says that no plan is to be continued."""
        return {"windows": "as they arrive"}

    def take(self, micro_batches: Iterable[Any], count: Count | None) -> None:
        """Takes this rank's part of the next window, and what each counts where that is not as usual.

        Raises:
            ConfigError: sums have a fixed order.
            MisuseError: it is one batch, whose parts or samples would be taken for micro-batches.
        """
        if isinstance(micro_batches, Tensor | Mapping | str):
            what = f"window() with one {type(micro_batches).__name__}"
            raise MisuseError(f"{what}, not with several micro-batches: give a list, as in acc.window([batch])")
        if self._planned:
            problem = "sums in the order of a plan, and acc.window() has none"
            raise ConfigError("numerics", REPRODUCIBLE, problem, "Use numerics=fast, or acc.windows(data)")
        self._arrived, self._count = micro_batches, count

    def windows(self, epoch: int, start: int, counter: GlobalCounter) -> Iterator[Window]:
        """See :class:`WindowLoader`. One small host all-reduce per window.

        Raises:
            NothingArrivedError: asked for another window than has arrived.
            PeerError: another rank could not make its part of a window, and raises why.
        """
        index = start
        while self._arrived is not None:
            arrived, self._arrived = self._arrived, None
            counted = partial(counter.micro_batch, count=self._count)
            micro_batches: list[MicroBatch] = []
            sizes: list[int] = []
            error: Exception | None = None
            try:
                for batch in arrived:
                    micro_batches.append(counted(batch))
                    sizes.append(self._samples(batch))
            except Exception as problem:  # every rank has to learn of it, or it waits for this one
                error = problem
            counts, (samples,) = counter.all_reduce(micro_batches, [sum(sizes)], error=error)
            yield Window(
                epoch=epoch,
                samples=int(samples),
                counts=counts,
                micro_batches=micro_batches,
                data_wait_s=0.0,
                keys=keys_of(range(len(micro_batches)), self._seed, index, self._world.rank),
                rows=sizes.__getitem__,
                counted=counted,
            )
            index += 1
        raise NothingArrivedError

    def _samples(self, batch: Any) -> int:
        """Of a micro-batch; one where its parts do not say, which is only noted."""
        try:
            return self._size(batch)
        except DataError:
            return 1
