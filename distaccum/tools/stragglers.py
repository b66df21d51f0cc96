"""Finds the rank that the others wait for, at no collective of its own: each rank's times ride in the count."""

from __future__ import annotations

import logging
from operator import add
from statistics import median_low as median
from time import perf_counter

from distaccum.data.hooks import WindowHook
from distaccum.distributed.world import World
from distaccum.errors import MisuseError

_log = logging.getLogger(__name__)
WINDOWS, RATIO = 50, 1.5  # a rank is slow that needs so much longer than the median of the ranks, over so many windows
_LEAST_S = 0.01  # a window: less is noise
_WARM_UP = 2  # windows of which nothing is said: they compile, and start loaders
_MOST_SLOTS = 256


class Stragglers(WindowHook):
    """Compares what the ranks do by themselves: loading data, and computing until the gradient's reduction.

    On a GPU that is the host's time.

    Args:
        world: this rank.
        forward_communicates: whether the ranks wait for each other in forwards too: of those nothing is said.
    """

    def __init__(self, world: World, *, forward_communicates: bool) -> None:
        self._world, self._activity, self._computes = world, world.activity, not forward_communicates
        self._slots = min(world.size, _MOST_SLOTS)
        self._windows = -_WARM_UP
        self._totals: list[float] = []
        self._slow: int | None = None
        self.metrics: dict[str, float] = {}
        """``slowest_rank``, and its time over the median of the ranks; empty before the first ``WINDOWS``."""

    def outgoing(self, micro_batches: int, losses: int) -> list[float]:
        """One, so that a collective of the program's own is noticed; the seconds of loading, and of computing."""
        activity, slots = self._activity, self._slots
        times = [0.0] * (2 * slots)
        slot = self._world.rank % slots
        times[slot] = perf_counter() - activity.loading_at
        if self._computes and activity.arrived_at > activity.counted_at:  # else it is another round for one window
            times[slots + slot] = activity.arrived_at - activity.counted_at
        return [1.0, *times]

    def incoming(self, sums: list[float]) -> None:
        """What :meth:`outgoing` gave, summed over the ranks.

        Raises:
            MisuseError: they are not those of a count.
        """
        if sums[0] != self._world.size:
            problem = "the count's all-reduce has met a collective that this program calls on some ranks only"
            raise MisuseError(f"{problem}: call each collective of your own on every rank, in the same order")
        self._windows += 1
        if self._windows <= 0:
            return
        self._totals = list(map(add, self._totals, sums[1:])) if self._totals else sums[1:]
        if self._windows >= WINDOWS:
            self._compare(self._totals)
            self._totals, self._windows = [], 0

    def _compare(self, totals: list[float]) -> None:
        sharing = [len(range(slot, self._world.size, self._slots)) * WINDOWS for slot in range(self._slots)]
        loading = [total / n for total, n in zip(totals[: self._slots], sharing, strict=True)]
        computing = [total / n for total, n in zip(totals[self._slots :], sharing, strict=True)]
        each = [a + b for a, b in zip(loading, computing, strict=True)]
        middle, slowest = median(each), max(range(self._slots), key=each.__getitem__)
        ratio = each[slowest] / middle if middle else 1.0
        self.metrics = {"slowest_rank": slowest, "slowest_over_median": ratio}
        if ratio < RATIO or each[slowest] - middle < _LEAST_S:
            self._slow = None
        elif slowest != self._slow:
            self._slow = slowest
            if self._world.is_main:
                _log.warning("%s", self._explanation(slowest, ratio, loading, computing))

    def _explanation(self, slowest: int, ratio: float, loading: list[float], computing: list[float]) -> str:
        others = range(slowest, self._world.size, self._slots)
        who = f"rank {slowest}" if len(others) == 1 else f"one of the ranks {', '.join(map(str, others))}"
        loads = loading[slowest] - median(loading) > computing[slowest] - median(computing)
        what, times = ("loading data", loading) if loads else ("its forwards and backwards", computing)
        look = "its files and loading processes" if loads else "its clock and temperature, and who shares its cores"
        return (
            f"{who} is slow: {ratio:.2f}x the median of the ranks over {WINDOWS} steps. It needs "
            f"{times[slowest]:.3f} s a step for {what}, and the median rank {median(times):.3f} s; all others wait "
            f"for it. Look at {look}"
        )
