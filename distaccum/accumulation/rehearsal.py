"""What a rehearsal of the micro-batch has found; it is a tool, reached by its name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What one size was measured at, the worst of all ranks.

    Args:
        size: samples.
        seconds: of a forward and backward.
        memory: bytes beside weights and gradients; None where it was not measured.
    """

    size: int
    seconds: float
    memory: int | None

    @property
    def rate(self) -> float:
        """Samples a second."""
        return self.size / self.seconds


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """The micro-batch that was found, and why.

    Args:
        micro_size: samples of a micro-batch.
        tokens: elements of a micro-batch of so many of the longest samples; of token data padded tokens.
        reason: one line for people.
        trials: the sizes that were run.
        memory: bytes that a micro-step could take, on the rank that has the fewest; None: not known.
        left_out: the smallest size that was not run as it would not fit; None: none.
        seconds: that it took.
    """

    micro_size: int
    tokens: int
    reason: str
    trials: Sequence[Trial] = field(default_factory=list)
    memory: int | None = None
    left_out: int | None = None
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """As values that JSON can hold."""
        return asdict(self)
