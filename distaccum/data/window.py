"""The micro-batches of one optimizer step on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from distaccum.losses.normalize import SINGLE, Counts


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one forward/backward takes, and what it counts by loss; no counts where they are not known beforehand."""

    batch: Any
    counts: Counts

    @property
    def count(self) -> float:
        """What the single loss counts."""
        return self.counts[SINGLE]


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """The micro-batches of one optimizer step on one rank, and what the step counts over all ranks.

    A rank may have fewer micro-batches than another one, or none.
    """

    epoch: int
    samples: int  # over all ranks
    counts: Counts  # over all ranks: what the losses average over; empty where not known beforehand
    micro_batches: Sequence[MicroBatch]  # on the host
    data_wait_s: float
    ids: Callable[[], Iterable[Sequence[int]]] = tuple
    """Which samples each micro-batch holds, looked up where somebody asks: their numbers in the dataset, or in this
    rank's stream of the epoch."""
