"""Divides windows over streams: ranks whose stream has ended leave their part to the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import InitVar, dataclass
from typing import Any, ClassVar, Literal

from distaccum.data.plan.batch import KEYWORDS, SizeNames, check_sizes, describe_steps, micro_steps_of
from distaccum.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class StreamPlan:
    """Windows over streams of unknown length, one stream per rank.

    Args:
        global_batch_size: samples per optimizer step over all ranks.
        micro_batch_size: the most samples one forward/backward on one rank takes.
        world_size: number of ranks.
        batched: whether the streams yield micro-batches, which are taken whole, instead of samples.
        names: what an error calls the sizes.

    Raises:
        ConfigError: a size is below 1, the micro-batch is larger than the global batch, or, with ``batched``, the
            global batch is no multiple of it.
    """

    global_batch_size: int
    micro_batch_size: int
    world_size: int
    batched: bool = False
    names: InitVar[SizeNames] = KEYWORDS
    is_stream: ClassVar[Literal[True]] = True

    def __post_init__(self, names: SizeNames) -> None:
        check_sizes(self.global_batch_size, self.micro_batch_size, names)
        left_over = self.global_batch_size % self.micro_batch_size
        if self.batched and left_over:
            multiple_of = f"{names.micro_batch_size}={self.micro_batch_size}"
            problem = f"no multiple of {multiple_of}, and the stream's batches are taken whole"
            remedy = f"Use {self.global_batch_size - left_over}, or a stream of samples"
            raise ConfigError(names.global_batch_size, self.global_batch_size, problem, remedy)

    def wanted(self, samples: int) -> int:
        """Items that a window of ``samples`` still wants: samples, or micro-batches that fit whatever their size."""
        return (self.global_batch_size - samples) // (self.micro_batch_size if self.batched else 1)

    @property
    def items_of_window(self) -> int:
        """Samples of a rank's largest window."""
        return -(-self.wanted(0) // self.world_size)

    def quota(self, wanted: int, alive: Sequence[bool], rank: int, *, turn: int = 0) -> int:
        """How many of the ``wanted`` items ``rank`` fetches, where only the ranks ``alive`` have items left.

        A remainder goes to other ranks every ``turn``, so that all streams shrink at the same rate.
        """
        if not alive[rank]:
            return 0
        ranks = sum(alive)
        place = (sum(alive[:rank]) + turn) % ranks
        return wanted * (place + 1) // ranks - wanted * place // ranks

    @property
    def position(self) -> dict[str, int]:
        """The numbers that give a window's index its meaning; a stream's state fits only the same world size."""
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
        """The plan in words, one line per fact."""
        steps = self.as_dict()["accumulation_steps"]
        update = f"global batch {self.global_batch_size} samples = {describe_steps(self, steps)}"
        return [update, "what the ranks' streams hold"]
