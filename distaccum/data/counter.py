"""The one small all-reduce of a window: the counts of its losses, and whether a rank asks to stop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distaccum.data.window import MicroBatch
from distaccum.distributed.world import World
from distaccum.errors import MisuseError
from distaccum.losses.normalize import Count, Counts, as_counts


class GlobalCounter:
    """Counts micro-batches on the host, and sums the counts over the ranks.

    ``stopping`` says whether some rank has asked to stop; it is the same on every rank.

    Args:
        world: this rank.
        count: the count of a batch, by loss; None where it is known only after the forward.
    """

    def __init__(self, world: World, count: Count | None) -> None:
        self._world, self._count = world, count
        self._names: tuple[str, ...] | None = () if count is None else None
        self._stop_requested = False
        self.stopping = False

    def request_stop(self) -> None:
        """Asks all ranks to stop; the next :meth:`all_reduce` tells them. Safe in a signal handler."""
        self._stop_requested = True

    def clear_stop(self) -> None:
        """Forgets every request to stop; all ranks call it."""
        self._stop_requested = self.stopping = False

    def micro_batch(self, batch: Any) -> MicroBatch:
        """The batch with its counts."""
        return MicroBatch(batch, as_counts(self._count(batch)) if self._count else {})

    def all_reduce(self, micro_batches: Sequence[MicroBatch], more: Sequence[float] = ()) -> tuple[Counts, list[float]]:
        """The counts of these micro-batches over all ranks, and the sums of ``more``; a collective.

        Raises:
            MisuseError: a batch counts under a name that no batch of the first window had.
        """
        if self._names is None:  # a rank without a batch cannot know the names: gathered once per run
            names = self._world.all_gather_names([name for micro in micro_batches for name in micro.counts])
            self._names = names or None  # no rank had a batch: gathered again
        own = dict.fromkeys(self._names or (), 0.0)
        for micro in micro_batches:
            for name, count in micro.counts.items():
                if name not in own:
                    raise MisuseError(
                        f"a batch counts {name!r}, and the first window only {sorted(own)}: count 0 there"
                    )
                own[name] += count
        stops, *sums = self._world.all_reduce_host([self._stop_requested, *own.values(), *more])
        self.stopping = self.stopping or stops > 0
        return dict(zip(own, sums, strict=False)), sums[len(own) :]
