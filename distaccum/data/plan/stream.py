"""Windows over streams, which have no positions: what is left is taken from the ranks that still have some."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from distaccum.data.plan.batch import check_sizes, describe_steps, micro_steps_of
from distaccum.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class StreamPlan:
    """Windows over streams of unknown length, one stream a rank.

    Args:
        global_batch_size: samples per optimizer step over all ranks.
        micro_batch_size: the most samples one forward/backward on one rank takes.
        world_size: number of ranks.
        batched: the streams give micro-batches, not samples; they are taken whole.

    Raises:
        ConfigError: if a size is below 1, or the micro-batch is larger than the global batch.
    """

    global_batch_size: int
    micro_batch_size: int
    world_size: int
    batched: bool = False

    def __post_init__(self) -> None:
        check_sizes(self.global_batch_size, self.micro_batch_size)
        if self.batched and self.global_batch_size % self.micro_batch_size:
            problem = f"no multiple of micro_size={self.micro_batch_size}, and the stream's batches are taken whole"
            remedy = (
                f"Use {self.global_batch_size // self.micro_batch_size * self.micro_batch_size}, or a stream of samples"
            )
            raise ConfigError("batch.global_size", self.global_batch_size, problem, remedy)

    def wanted(self, samples: int) -> int:
        """Items that a window with so many samples still wants: samples, or whole micro-batches that surely fit."""
        return (self.global_batch_size - samples) // (self.micro_batch_size if self.batched else 1)

    def quota(self, wanted: int, alive: Sequence[bool], rank: int, *, turn: int = 0) -> int:
        """How many of the wanted items ``rank`` fetches, where only the ranks ``alive`` have any left.

        What does not divide evenly goes to other ranks every ``turn``, so that streams are used up at one pace.
        """
        if not alive[rank]:
            return 0
        ranks = sum(alive)
        place = (sum(alive[:rank]) + turn) % ranks
        return wanted * (place + 1) // ranks - wanted * place // ranks

    @property
    def position(self) -> dict[str, int]:
        """What gives a window's number its meaning: the stream's own state, at the same world size."""
        return {
            "batch.global_size": self.global_batch_size,
            "batch.micro_size": self.micro_batch_size,
            "world": self.world_size,
        }

    def as_dict(self) -> dict[str, Any]:
        """The plan as written to ``plan.json``."""
        return {
            "unit": "samples",
            "samples": None,
            "global_size": self.global_batch_size,
            "micro_size": self.micro_batch_size,
            "world_size": self.world_size,
            "accumulation_steps": micro_steps_of(range(self.global_batch_size), self.world_size, self.micro_batch_size),
            "windows_per_epoch": None,
            "last_window_size": None,
        }

    def describe(self) -> list[str]:
        """The plan in words, a line a thought."""
        steps = self.as_dict()["accumulation_steps"]
        update = f"global batch {self.global_batch_size} samples = {describe_steps(self, steps)}"
        return [update, "what the ranks' streams hold"]
