"""The one small all-reduce of a window: what its losses count, and whether a rank wants to stop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from distaccum.data.window import MicroBatch
from distaccum.distributed.world import World
from distaccum.errors import MisuseError
from distaccum.losses.normalize import Count, Counts, as_counts


def _never() -> bool:
    return False


class GlobalCounter:
    """Counts micro-batches on the host, and adds up over the ranks.

    Args:
        world: this rank.
        count: what a batch counts, by loss; None where that is only known after the forward.
        wants_stop: whether this rank wants to stop; asked once a window.
    """

    def __init__(self, world: World, count: Count | None, wants_stop: Callable[[], bool] = _never) -> None:
        self._world, self._count, self._wants_stop = world, count, wants_stop
        self._names: tuple[str, ...] | None = () if count is None else None
        self.stopping = False  # on every rank alike: some rank wanted to

    def micro_batch(self, batch: Any) -> MicroBatch:
        """The batch with its counts."""
        return MicroBatch(batch, as_counts(self._count(batch)) if self._count else {})

    def all_reduce(self, micro_batches: Sequence[MicroBatch], more: Sequence[float] = ()) -> tuple[Counts, list[float]]:
        """What these micro-batches of all ranks count, and the sums of ``more``; a collective.

        Raises:
            MisuseError: a batch counts under a name that no batch of the first window had.
        """
        if self._names is None:  # a rank with nothing cannot know the names: asked once a run
            names = self._world.all_gather_names([name for micro in micro_batches for name in micro.counts])
            self._names = names or None  # nobody had anything: asked again
        own = dict.fromkeys(self._names or (), 0.0)
        for micro in micro_batches:
            for name, count in micro.counts.items():
                if name not in own:
                    raise MisuseError(
                        f"a batch counts {name!r}, and the first window only {sorted(own)}: count 0 there"
                    )
                own[name] += count
        stops, *sums = self._world.all_reduce_host([self._wants_stop(), *own.values(), *more])
        self.stopping = self.stopping or stops > 0
        return dict(zip(own, sums, strict=False)), sums[len(own) :]
