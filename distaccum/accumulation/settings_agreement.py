"""Compares the settings of the optimizers' groups over the ranks, at no collective of its own: they ride in the count.

Ranks that step with different rates hold different weights, or, where each steps a part, parts of different models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from distaccum.distributed.world import World
from distaccum.engines.base import Engine
from distaccum.engines.group_settings import OTHER_SETTINGS, differ, fingerprint, plain_settings
from distaccum.errors import MisuseError


class SettingsAgreement:
    """What is known when a window is counted: the groups' settings, and the schedule's next factor.

    What a torch scheduler or a loop sets later, within the window, is compared with the next.

    Args:
        engine: whose optimizers are compared.
        world: this rank.
        next_factors: the schedule's factors that the coming step may get.
    """

    def __init__(self, engine: Engine, world: World, next_factors: Callable[[], Sequence[float]]) -> None:
        self._engine, self._world, self._next_factors = engine, world, next_factors

    def outgoing(self, micro_batches: int, losses: int) -> list[float]:
        """A number that stands for the settings, and its square."""
        if self._world.size == 1:
            return []
        engine = self._engine
        factors = self._next_factors()
        number = fingerprint(engine.optimizers, factors, hooks=engine.steps_parts, world_size=self._world.size)
        return [number, number**2]

    def incoming(self, sums: list[float]) -> None:
        """What :meth:`outgoing` gave, summed over the ranks.

        Raises:
            MisuseError: the ranks differ; raised on all of them.
        """
        if sums and differ(sums, self._world.size):
            raise MisuseError(self._explanation())

    def _explanation(self) -> str:
        """A collective."""
        own: dict[str, Any] = {"the schedule's next factor": list(self._next_factors())[-1:]}
        own |= plain_settings(self._engine.optimizers, hooks=self._engine.steps_parts)
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
