"""Whether the ranks do the same: begin the same window, and hold the same weights when that matters."""

from __future__ import annotations

from dataclasses import dataclass
from zlib import crc32

from distaccum.data.counter import GlobalCounter
from distaccum.distributed.world import World
from distaccum.errors import MisuseError, shorten
from distaccum.verification.replicas import Replicas

_PLACES = 2**20  # so that the sums of their squares are whole numbers in fp64, up to 4096 ranks


@dataclass(frozen=True)
class Place:
    """Where a rank is: it begins a window of an epoch, after so many steps of this process."""

    epoch: int
    window: int
    steps: int


class Lockstep:
    """Compares the ranks' places: two numbers of each rank's ride in a window's count.

    A ``break``, an exception or ``abandon()`` on some ranks only sets them apart.

    Args:
        world: this rank.
        counter: of the windows.
        replicas: the weights that every rank holds.
    """

    def __init__(self, world: World, counter: GlobalCounter, replicas: Replicas) -> None:
        self._world, self._counter, self._replicas = world, counter, replicas
        self._epoch = self._window = self._steps = 0  # of the window that is counted next
        self._unchecked = 0  # windows since the replicas were compared at once

    @property
    def ran(self) -> bool:
        """Whether a window has ended in this process."""
        return self._steps > 0

    def begin(self, epoch: int, window: int) -> None:
        """Notes the window that is counted next."""
        self._epoch, self._window = epoch, window

    def window_counted(self) -> None:
        """Notes that the one after it is next."""
        self._window += 1

    def window_ended(self) -> None:
        """Notes a step, applied or not."""
        self._steps += 1
        self._unchecked += 1

    def epoch_ended(self) -> None:
        """Compares the weights, where that costs little beside the windows since the last time; a collective then."""
        if self._replicas.every and self._unchecked >= self._replicas.every:
            self.check_replicas("the end of an epoch")

    def check_replicas(self, what: str) -> None:
        """Compares the weights at once, as a part of ``what``; a collective.

        Raises:
            VerificationError: they differ; on all ranks.
            MisuseError: other ranks are elsewhere.
        """
        if self._world.size > 1:
            self._counter.sum_together(what)
            self._replicas.check()
        self._unchecked = 0

    def outgoing(self, micro_batches: int, losses: int) -> list[float]:
        """The place's number, and its square; nothing on one rank."""
        if self._world.size == 1:
            return []
        number = float(crc32(f"{self._epoch}, {self._window}, {self._steps}".encode()) % _PLACES)
        return [number, number * number]

    def incoming(self, sums: list[float]) -> None:
        """The sum and the sum of the squares: their variance is 0 only where all numbers are the same.

        Raises:
            MisuseError: the ranks are apart; raised on all of them.
        """
        if not sums:
            return
        total, squares = map(int, sums)
        if self._world.size * squares == total * total:
            return
        own = Place(epoch=self._epoch, window=self._window, steps=self._steps)
        places: list[Place] = self._world.all_gather_object(own)
        said = shorten(
            f"rank {rank} begins window {one.window} of epoch {one.epoch} after {one.steps} steps"
            for rank, one in enumerate(places)
        )
        raise MisuseError(
            f"the ranks are not at the same window: {said}. A break, an exception or abandon() has ended a window or a "
            "loop on some ranks only: let all ranks decide together, as acc.stop() does, and resume from a checkpoint"
        )
