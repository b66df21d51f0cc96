"""Divides samples into windows of at most a number of tokens: pure arithmetic, no torch, no state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import InitVar, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from distaccum.data.plan.batch import (
    KEYWORDS,
    Epoch,
    Ids,
    SizeNames,
    check_samples,
    check_sizes,
    describe_steps,
    ids_in_order,
    micro_batches_of,
    seed_number,
)
from distaccum.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class TokenPlan:
    """A plan like :class:`BatchPlan` whose windows hold as many samples as fit into a budget of tokens.

    A window takes the next samples of the epoch's order while their tokens stay within the budget, and at least one.
    So its samples depend on neither the world size nor the micro-batch size.

    Args:
        lengths: tokens of each sample, shape ``(samples,)``.
        tokens: the most tokens of one optimizer step over all ranks.
        micro_batch_size: the most samples one forward/backward on one rank takes.
        world_size: number of ranks.
        seed: for the order of samples, which differs every epoch; None for the dataset's own order.
        names: what an error calls the sizes.

    Raises:
        ConfigError: a size is below 1, or there are no samples.
    """

    lengths: Ids
    tokens: int
    micro_batch_size: int
    world_size: int
    seed: int | None = None
    names: InitVar[SizeNames] = KEYWORDS

    def __post_init__(self, names: SizeNames) -> None:
        check_sizes(None, self.micro_batch_size, names)
        if self.tokens < 1:
            raise ConfigError(names.tokens, self.tokens, "must be at least 1", "State a positive number of tokens")
        check_samples(len(self.lengths))

    @property
    def samples(self) -> int:
        """Samples per epoch over all ranks."""
        return len(self.lengths)

    def epoch(self, epoch: int) -> Epoch:
        """The epoch's windows; O(samples)."""
        filled = np.cumsum(self.lengths[self.ids(epoch, np.arange(self.samples))])
        ends: list[int] = []
        while not ends or ends[-1] < self.samples:
            begin = ends[-1] if ends else 0
            before = filled[begin - 1] if begin else 0
            ends.append(max(begin + 1, int(np.searchsorted(filled, before + self.tokens, side="right"))))
        return _TokenEpoch(ends=ends, micro_batch_size=self.micro_batch_size, world_size=self.world_size)

    def updates(self, epochs: int) -> int:
        """Windows in the first ``epochs`` epochs."""
        return sum(self.epoch(epoch).windows_per_epoch for epoch in range(epochs))

    def ids(self, epoch: int, positions: Ids) -> Ids:
        """The samples at these positions of an epoch's order."""
        return ids_in_order(self.samples, self.seed, epoch, positions)

    @property
    def position(self) -> dict[str, int]:
        """The numbers that give a window's index its meaning."""
        total = int(self.lengths.sum())
        samples = {"samples": self.samples, "tokens in all samples": total}
        return {"batch.tokens": self.tokens, **samples, "seed": seed_number(self.seed)}

    @cached_property
    def _first_epoch(self) -> Epoch:
        return self.epoch(0)

    def as_dict(self) -> dict[str, Any]:
        """The plan as written to ``plan.json``; windows are those of the first epoch."""
        windows = self._first_epoch.windows_per_epoch
        return {
            "unit": "tokens",
            "samples": self.samples,
            "global_size": self.tokens,
            "micro_size": self.micro_batch_size,
            "world_size": self.world_size,
            "accumulation_steps": max(len(self._first_epoch.micro_batches(k, 0)) for k in range(windows)),
            "windows_per_epoch": windows,
            "last_window_size": len(self._first_epoch.window(windows - 1)),
        }

    def describe(self) -> list[str]:
        """The plan in words, one line per fact."""
        plan = self.as_dict()
        update = f"global batch {self.tokens:,} tokens = up to {describe_steps(self, plan['accumulation_steps'])}"
        return [update, f"{self.samples:,} samples in {plan['windows_per_epoch']} windows (the first one)"]


@dataclass(frozen=True, kw_only=True)
class _TokenEpoch:
    """An epoch whose windows end at ``ends``."""

    ends: Sequence[int]
    micro_batch_size: int
    world_size: int

    @property
    def windows_per_epoch(self) -> int:
        return len(self.ends)

    def window(self, k: int) -> range:
        return range(self.ends[k - 1] if k else 0, self.ends[k])

    def micro_batches(self, k: int, rank: int) -> list[range]:
        return micro_batches_of(self.window(k), rank, self.world_size, self.micro_batch_size)
