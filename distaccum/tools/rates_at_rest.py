"""Whether the settings of an optimizer's groups, as its rates, move with each micro-batch of a window.

A step uses those that it finds. A schedule that is stepped for each micro-batch is somewhere else at another
micro-batch size; what a loop sets once a window, wherever in it, is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distaccum.engines.base import Engine
from distaccum.errors import shorten
from distaccum.verification.expected import NAMED

_TWICE = 2
_RATES: Sequence[str] = ("lr", "weight_decay")


class RatesAtRest:
    """Notes the rates at each forward of a window; see :meth:`in_words`.

    Args:
        engine: whose optimizers step.
        micro_batches: of this rank.
    """

    def __init__(self, engine: Engine, micro_batches: int) -> None:
        self._engine, self._micro_batches = engine, micro_batches
        self._last: dict[tuple[int, str], Any] | None = None
        self._moves: dict[str, int] = {}

    def look(self) -> None:
        """Called before each forward; reads rates that lie on a device."""
        groups = [group for optimizer in self._engine.optimizers for group in optimizer.param_groups]
        names = [(i, key) for i, group in enumerate(groups) for key in _RATES if key in group]
        now = {(i, key): float(groups[i][key]) for i, key in names}
        if self._last is not None:
            for key in {key for (i, key) in names if self._last.get((i, key)) != now[i, key]}:
                self._moves[key] = self._moves.get(key, 0) + 1
        self._last = now

    def in_words(self) -> str:
        """What has moved as often as micro-batches were run; empty where nothing has. A collective."""
        once = max(1, min(_TWICE, self._micro_batches - 1))  # between forwards: a loop may set them in its last one
        own = [key for key, moves in self._moves.items() if moves >= once and self._micro_batches > 1]
        names = self._engine.world.all_gather_names(own)
        if not names:
            return ""
        return (
            f"{shorten(names, NAMED)} of the optimizer changes from micro-batch to micro-batch: the step uses what the "
            "last one leaves, which depends on their number. Step a schedule once a window, after its step, or give "
            "it to the accumulator (`scheduler=`)"
        )
