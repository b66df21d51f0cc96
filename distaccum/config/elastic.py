"""How an elastic job deals with ranks that are lost and ranks that come."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from distaccum.config.checks import require_annotated, require_count, seconds_of


@dataclass(frozen=True, kw_only=True)
class ElasticConfig:
    """A job that ``launch/elastic.sh`` has started, whose windows go on where ranks are lost; no other reads it.

    Args:
        min_ranks: the fewest ranks that go on; fewer wait ten minutes for others, and then the run ends.
        rejoin: whether another process is started for one that has died, and taken in at a window's beginning.
        expel_after (duration): the others go on without a rank for which they have waited so long.
        memory_every: with engine=fsdp2 and deepspeed, windows between two checkpoints in the ranks' memory, to which
            the run goes back where a rank is lost.
    """

    min_ranks: int = 1
    rejoin: bool = True
    expel_after: Any = "30s"
    memory_every: int = 10

    def __post_init__(self) -> None:
        require_annotated("elastic", self)
        require_count("elastic.min_ranks", self.min_ranks, least=1)
        seconds_of("elastic.expel_after", self.expel_after)
        require_count("elastic.memory_every", self.memory_every, least=1)
