"""Learning-rate schedules: pure functions from the number of applied updates to a factor of ``optim.lr``."""

from __future__ import annotations

import math
from typing import Protocol

from distaccum.errors import ConfigError


class Schedule(Protocol):
    """The factor of the peak learning rate for the update after ``step`` applied ones."""

    def __call__(self, step: int) -> float:
        """The factor, usually in [0, 1]."""


class Constant:
    """The peak rate, after a linear warm-up over ``warmup_steps`` updates. ``total_steps`` does not matter to it."""

    def __init__(self, *, total_steps: int, warmup_steps: int = 0) -> None:
        self._warmup = _Warmup(warmup_steps)

    def __call__(self, step: int) -> float:
        """Rises to 1, then stays."""
        return self._warmup(step)


class Cosine:
    """A linear warm-up, then half a cosine down to ``final_ratio`` at ``total_steps``, and level from there.

    Source: I. Loshchilov and F. Hutter, "SGDR" (2017), without restarts.
    """

    def __init__(self, *, total_steps: int, warmup_steps: int = 0, final_ratio: float = 0.1) -> None:
        self._warmup = _Warmup(warmup_steps)
        if not 0 <= final_ratio <= 1:
            raise ConfigError("schedule.final_ratio", final_ratio, "not between 0 and 1", "Use a share of optim.lr")
        self._warmup_steps, self._final_ratio = warmup_steps, final_ratio
        self._decay_steps = max(1, total_steps - warmup_steps)

    def __call__(self, step: int) -> float:
        """Rises to 1, falls to ``final_ratio``."""
        progress = min(max(0.0, (step - self._warmup_steps) / self._decay_steps), 1.0)
        decay = self._final_ratio + (1 - self._final_ratio) * (1 + math.cos(math.pi * progress)) / 2
        return self._warmup(step) * decay


class _Warmup:
    def __init__(self, steps: int) -> None:
        if steps < 0:
            raise ConfigError("schedule.warmup_steps", steps, "negative", "Use 0 or more updates")
        self._steps = steps

    def __call__(self, step: int) -> float:
        return min(1.0, (step + 1) / (self._steps + 1))
