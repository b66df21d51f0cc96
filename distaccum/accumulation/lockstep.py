"""Whether all ranks begin the same window: two numbers of each rank's ride in the window's count."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass
from zlib import crc32

from distaccum.distributed.world import World
from distaccum.errors import MisuseError, shorten

_PLACES = 2**20  # so that the sums of their squares are whole numbers in fp64, up to 4096 ranks


@dataclass(frozen=True)
class Place:
    """Where a rank is: it begins a window of an epoch, after so many steps of this process."""

    epoch: int
    window: int
    steps: int


class Lockstep:
    """Compares the ranks' places. A ``break``, an exception or ``abandon()`` on some ranks only sets them apart.

    Args:
        world: this rank.
        place: of this rank.
    """

    def __init__(self, world: World, place: Callable[[], Place]) -> None:
        self._world, self._place = world, place

    def outgoing(self, micro_batches: int, losses: int) -> list[float]:
        """The place's number, and its square."""
        number = float(crc32(repr(astuple(self._place())).encode()) % _PLACES)
        return [number, number * number]

    def incoming(self, sums: list[float]) -> None:
        """The sum and the sum of the squares: their variance is 0 only where all numbers are the same.

        Raises:
            MisuseError: the ranks are apart; raised on all of them.
        """
        total, squares = map(int, sums)
        if self._world.size * squares == total * total:
            return
        places: list[Place] = self._world.all_gather_object(self._place())
        said = shorten(
            f"rank {rank} begins window {one.window} of epoch {one.epoch} after {one.steps} steps"
            for rank, one in enumerate(places)
        )
        raise MisuseError(
            f"the ranks are not at the same window: {said}. A break, an exception or abandon() has ended a window or a "
            "loop on some ranks only: let all ranks decide together, as acc.stop() does, and resume from a checkpoint"
        )
