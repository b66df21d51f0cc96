"""The one small all-reduce of a window: the counts of its losses, and whether a rank asks to stop."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import chain, islice
from time import perf_counter
from typing import Any
from zlib import crc32

from distaccum.data import loading_processes
from distaccum.data.agreement import raise_on_all
from distaccum.data.hooks import Hooks
from distaccum.data.window import MicroBatch
from distaccum.distributed.activity import Phase
from distaccum.distributed.world import World
from distaccum.errors import GONE, MisuseError, PeerError
from distaccum.losses.normalize import Count, Counts, as_counts

# What a rank adds to the number of those that ask to stop: one with an error, and one that is not at a window's
# beginning, but in a collective of the user's loop.
_FAILED = 2.0**32
_ELSEWHERE = 2.0**42
_SCALE, _BITS, _PARTS = 160, 32, 8  # of a number in parts of so many bits, of which the first one counts 2**-160
_PLACES = 2**19  # by which those in different collectives are told apart


class GlobalCounter:
    """Counts micro-batches on the host, and sums the counts over the ranks.

    ``stopping`` says whether some rank has asked to stop; it is the same on every rank.

    Args:
        world: this rank.
        count: the count of a batch, by loss; None where it is known only after the forward.
        exact: whether counts that are no whole numbers are summed without rounding, so that the sum does not depend on
            which rank has which micro-batch.
    """

    def __init__(self, world: World, count: Count | None, *, exact: bool = False) -> None:
        self._world, self._count, self._exact = world, count, exact
        self._names: tuple[str, ...] | None = () if count is None else None
        self._stop_requested = False
        self._width = 0  # numbers in the last all-reduce, next to the signal
        self.stopping = False
        self.hooks = Hooks()
        """Their numbers ride in the count's all-reduce."""

    @property
    def names(self) -> tuple[str, ...]:
        """What batches count, by name, once a window was counted; empty before."""
        return self._names or ()

    def know(self, names: Sequence[str]) -> None:
        """Takes the :attr:`names` that all ranks of an earlier part of the run have found; empty changes nothing."""
        if self._names is None:
            self._names = tuple(names) or None

    def request_stop(self) -> None:
        """Asks all ranks to stop; the next :meth:`all_reduce` tells them. Safe in a signal handler."""
        self._stop_requested = True

    def clear_stop(self) -> None:
        """Forgets every request to stop; all ranks call it."""
        self._stop_requested = self.stopping = False

    def sum_together(self, what: str, numbers: Sequence[float] = (), *, remedy: str = "") -> list[float]:
        """The sums of ``numbers`` over the ranks, for a collective ``what`` that a loop makes between two windows.

        It has the form of :meth:`all_reduce`, so that a rank which goes on to its next window meets it, and both say so
        instead of waiting for each other.

        Raises:
            MisuseError: some ranks do not call it; the others raise PeerError.
            PeerError: another rank has failed, or is gone.
        """
        fits = len(numbers) <= self._width
        given = [*numbers, *[0.0] * (self._width - len(numbers))] if fits else [0.0] * self._width
        own = _ELSEWHERE + crc32(what.encode()) % _PLACES
        signals, *sums = self._sum([own, *given])
        if signals % _ELSEWHERE >= _FAILED:
            raise_on_all(self._world, None, f"while this one called {what}")
        if signals != self._world.size * own:
            if remedy or what.endswith("()"):
                problem = f"{what} was called on some ranks alone, and the others have gone on to their next window"
                remedy = remedy or f"call it on every rank, as in `value = acc.{what}` before `if acc.world.is_main:`"
            else:
                problem = f"the ranks have gone apart: this one is at {what}, and others are elsewhere"
                remedy = "let all ranks decide together on a break or abandon(), as acc.stop() does"
            raise_on_all(self._world, MisuseError(f"{problem}: {remedy}"), "between two windows")
        return sums[: len(numbers)] if fits else self._world.all_reduce_host(numbers)

    def tell(self, error: Exception) -> None:
        """Answers the other ranks' next count, or what else they do together, with ``error``, which is not raised here.

        They raise PeerError. Whoever is gone by then is not told.
        """
        with suppress(PeerError):
            self._sum([_FAILED, *[0.0] * self._width])
            with suppress(type(error)):
                raise_on_all(self._world, error, "")

    def _sum(self, numbers: Sequence[float]) -> list[float]:
        try:
            return self._world.all_reduce_host(numbers)
        except RuntimeError as error:  # of the backend, or torch's of a loading process that has died
            meant = loading_processes.explain_late(error)
            raise PeerError(GONE, "while this one waited for it") if meant is error else meant from error

    def micro_batch(self, batch: Any, count: Count | None = None) -> MicroBatch:
        """The batch with its counts; by ``count`` where that is given."""
        count = count or self._count
        return MicroBatch(batch, as_counts(count(batch)) if count is not None else {})

    def all_reduce(
        self, micro_batches: Sequence[MicroBatch], more: Sequence[float] = (), *, error: Exception | None = None
    ) -> tuple[Counts, list[float]]:
        """The counts of these micro-batches over all ranks, and the sums of ``more``; a collective.

        Args:
            micro_batches: this rank's.
            more: further numbers to add up.
            error: why this rank could not load its part. It is raised here, and all other ranks learn of it.

        Raises:
            MisuseError: a batch counts under a name that no batch of the first window had.
            PeerError: another rank has an ``error``, or is gone.
        """
        if self._names is None:  # a rank without a batch cannot know the names: gathered once per run
            names = self._world.all_gather_names([name for micro in micro_batches for name in micro.counts])
            self._names = names or None  # no rank had a batch: gathered again
        own = dict.fromkeys(self._names or (), 0.0)
        for micro in micro_batches:
            for name, count in micro.counts.items():
                if name in own:
                    own[name] += count
                else:
                    known = f"and the first window only {sorted(own)}: count 0 there"
                    error = error or MisuseError(f"a batch counts {name!r}, {known}")
        counts = list(own.values())
        if self._exact:
            counts = exact_sums([micro.counts.get(name, 0.0) for micro in micro_batches] for name in own)
        signal = float(self._stop_requested) + (0.0 if error is None else _FAILED)
        riding = [hook.outgoing(len(micro_batches), len(own)) for hook in self.hooks.travelling]
        numbers = [signal, *counts, *more, *chain.from_iterable(riding)]
        self._width = len(numbers) - 1
        activity = self._world.activity
        activity.phase = Phase.COUNTING
        signals, *sums = self._sum(numbers)
        activity.phase = Phase.LOADING
        activity.counted_at = activity.loading_at = perf_counter()
        if signals >= _FAILED:  # or elsewhere: that rank says where
            where = "while this one began a window" if signals >= _ELSEWHERE else "before its next window"
            raise_on_all(self._world, error, where)
        self.stopping = self.stopping or signals > 0
        rest = iter(sums[len(counts) + len(more) :])
        for hook, sent in zip(self.hooks.travelling, riding, strict=True):
            hook.incoming(list(islice(rest, len(sent))))
        totals = sums[: len(counts)]
        if self._exact:
            totals = joined(totals)
        return dict(zip(own, totals, strict=True)), sums[len(counts) : len(counts) + len(more)]


def exact_sums(numbers: Iterable[Sequence[float]]) -> list[float]:
    """The sum of each of several lists in parts, which are summed over ranks in any order without rounding.

    :func:`joined` makes numbers of them. A number is taken to a multiple of 2**-160; sums of 2**21 ranks are exact.
    """
    parts = list[float]()
    for each in numbers:
        if not all(map(math.isfinite, each)):
            parts += [*[0.0] * (_PARTS - 1), sum(each)]
            continue
        whole = sum(round(math.ldexp(number, _SCALE)) for number in each)
        parts += [float((whole >> (_BITS * i)) & (2**_BITS - 1)) for i in range(_PARTS - 1)]
        parts.append(float(whole >> (_BITS * (_PARTS - 1))))
    return parts


def joined(parts: Sequence[float]) -> list[float]:
    """The sums that :func:`exact_sums` gave, or several ranks' added up; each is rounded once."""
    found = []
    for begin in range(0, len(parts), _PARTS):
        own = parts[begin : begin + _PARTS]
        finite = all(map(math.isfinite, own))
        whole = sum(int(part) << (_BITS * i) for i, part in enumerate(own)) if finite else 0
        found.append(whole / 2**_SCALE if finite else sum(own))
    return found
