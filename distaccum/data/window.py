"""The micro-batches of one optimizer step on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from distaccum.data.plan.units import UnitAssignment
from distaccum.distributed.random import keys_of
from distaccum.losses.normalize import SINGLE, Counts


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The batch of one forward/backward, and its counts by loss; empty where they are not known beforehand."""

    batch: Any
    counts: Counts

    @property
    def count(self) -> float:
        """The count of a single loss."""
        return self.counts[SINGLE]


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """The micro-batches of one optimizer step on one rank, and the step's counts over all ranks.

    Ranks may have different numbers of micro-batches, or none.
    """

    epoch: int
    samples: int  # over all ranks
    counts: Counts  # over all ranks, what the losses average over; empty where they are not known beforehand
    micro_batches: Sequence[MicroBatch]  # on the host
    data_wait_s: float  # of the host
    ids: Callable[[], Iterable[Sequence[int]]] = tuple
    """The samples of each micro-batch, computed on demand: numbers in the dataset, or in this rank's stream of the
    epoch."""
    keys: Sequence[int] = ()
    """One number per micro-batch, which seeds the random numbers of its micro-step: a function of the run's seed, the
    epoch and the place of the micro-batch's first sample in the epoch's order (of a stream: in this rank's stream), but
    of nothing else. Without keys random numbers are drawn from the rank's own generators."""
    key_at: Callable[[int, int], int] | None = None
    """The key of a part of a micro-batch, by the micro-batch's number and the place of the part's first sample in it:
    the one that a micro-batch would have which begins there. None where keys say nothing of places."""
    rows: Callable[[int], int | None] | None = None
    """The samples of a micro-batch, by its number: what it can be cut between. None for rows of which each holds whole
    samples, as many as its tensors have; without the function nobody knows."""
    counted: Callable[[Any], MicroBatch] | None = None
    """Counts a part of a micro-batch; None: as every batch is counted."""
    device_wait_s: Callable[[], float] | None = None
    """Gives the seconds that a GPU waited for the micro-batches, when the window is done; None on a CPU."""
    assignment: UnitAssignment | None = None
    """Where micro-batches are units, whose sums do not depend on the ranks: how the window's are dealt."""
    fetch: Callable[[Sequence[int]], tuple[list[Any], Callable[[list[Any]], Any]]] | None = None
    """Gives samples by their numbers, and what collates them; None where they cannot be fetched a second time."""

    def own_key(self, i: int, row: int) -> int | None:
        """The key of a micro-batch that begins with this row of micro-batch ``i``; None where there are no keys."""
        if not self.keys or row == 0:
            return self.keys[i] if self.keys else None
        return keys_of([row], self.keys[i])[0] if self.key_at is None else self.key_at(i, row)
