"""Whether the ranks do the same: begin the same window, and hold the same weights when that matters.

On one rank no hook of these is attached.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

from distaccum.data.counter import GlobalCounter
from distaccum.data.hooks import WindowHook
from distaccum.data.window import Window
from distaccum.distributed.world import World
from distaccum.engines.base import Engine
from distaccum.engines.group_settings import OTHER_SETTINGS, differ, fingerprint, plain_settings
from distaccum.errors import MisuseError, shorten
from distaccum.verification.replicas import Replicas

# Compares the settings of the optimizers' groups over the ranks, at no collective of its own: they ride in the count.
#
# Ranks that step with different rates hold different weights, or, where each steps a part, parts of different models.


class SettingsAgreement(WindowHook):
    """What is known when a window is counted: the groups' settings, and the schedule's next factor.

    What a torch scheduler or a loop sets later, within the window, is compared with the next.

    Args:
        engine: whose optimizers are compared.
        next_factors: the schedule's factors that the coming step may get.
    """

    def __init__(self, engine: Engine, next_factors: Callable[[], Sequence[float]]) -> None:
        self._engine, self._world, self._next_factors = engine, engine.world, next_factors

    def outgoing(self, micro_batches: int, losses: int) -> list[float]:
        """A number that stands for the settings, and its square."""
        engine = self._engine
        factors = self._next_factors()
        number = fingerprint(engine.optimizers, factors, hooks=engine.facts.steps_parts, world_size=self._world.size)
        return [number, number**2]

    def incoming(self, sums: list[float]) -> None:
        """What :meth:`outgoing` gave, summed over the ranks.

        Raises:
            MisuseError: the ranks differ; raised on all of them.
        """
        if differ(sums, self._world.size):
            raise MisuseError(self._explanation())

    def _explanation(self) -> str:
        """A collective."""
        own: dict[str, Any] = {"the schedule's next factor": list(self._next_factors())[-1:]}
        own |= plain_settings(self._engine.optimizers, hooks=self._engine.facts.steps_parts)
        everyone = self._world.all_gather_object({name: repr(value) for name, value in own.items()})
        names = [name for each in everyone for name in each if len({one.get(name) for one in everyone}) > 1]
        if not names:
            return OTHER_SETTINGS
        name = min(names, key=lambda name: not name.startswith("lr "))
        values = [each.get(name, "not there") for each in everyone]
        other = next(rank for rank, value in enumerate(values) if value != values[0])
        return (
            f"ranks would step with different settings: {name} is {values[0]} on rank 0, and {values[other]} on rank "
            f"{other}. Make it the same on every rank: reduce what it is computed from, or leave the rank out of it"
        )


_PLACES = 2**20  # so that the sums of their squares are whole numbers in fp64, up to 4096 ranks


@dataclass(frozen=True)
class Place:
    """Where a rank is: it begins a window of an epoch, after so many steps of this process."""

    epoch: int
    window: int
    steps: int


class Lockstep(WindowHook):
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

    def after_step(self, window: Window) -> None:
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
        """The place's number, and its square."""
        number = float(crc32(f"{self._epoch}, {self._window}, {self._steps}".encode()) % _PLACES)
        return [number, number * number]

    def incoming(self, sums: list[float]) -> None:
        """The sum and the sum of the squares: their variance is 0 only where all numbers are the same.

        Raises:
            MisuseError: the ranks are apart; raised on all of them.
        """
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
