"""Which samples make up which micro-batch: pure arithmetic, no torch, no state.

Window ``k`` of an epoch covers the positions ``[k*G, min((k+1)*G, N))`` of that epoch's order, whatever the world size.
Ranks slice the window, micro-steps slice the rank's share. So a position is a function of ``(seed, epoch, window)``
alone, and both resuming and changing the world size are arithmetic.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from distaccum.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """The slicing of one epoch of ``samples`` into windows, rank shares and micro-batches.

    Args:
        samples: N, samples per epoch over all ranks.
        global_size: G, samples per optimizer step over all ranks. N need not be a multiple of it.
        micro_size: the most samples one forward/backward on one rank takes.
        world_size: number of ranks. G need not be a multiple of it.

    Raises:
        ConfigError: if any of them is below 1, or the micro-batch is larger than the global batch.
    """

    samples: int
    global_size: int
    micro_size: int
    world_size: int

    def __post_init__(self) -> None:
        for key, value in (("batch.global_size", self.global_size), ("batch.micro_size", self.micro_size)):
            if value < 1:
                raise ConfigError(key, value, "must be at least 1", "State a positive number of samples")
        if self.micro_size > self.global_size:
            raise ConfigError(
                "batch.micro_size",
                self.micro_size,
                f"larger than batch.global_size={self.global_size}",
                "One micro-batch cannot exceed the optimizer step it is part of: lower the one or raise the other",
            )
        if self.samples < 1:
            raise ConfigError("data", None, "the training set holds no samples", "Point it at data with some")
        assert self.world_size >= 1

    @property
    def windows_per_epoch(self) -> int:
        """Optimizer steps in an epoch; the last one may be ragged."""
        return -(-self.samples // self.global_size)

    @property
    def accumulation_steps(self) -> int:
        """Micro-steps of a full window on every rank: derived, never configured."""
        return self.micro_steps(0)

    def window(self, k: int) -> range:
        """Positions of window ``k`` in the epoch's order, over all ranks."""
        if not 0 <= k < self.windows_per_epoch:
            raise IndexError(f"window {k} of an epoch of {self.windows_per_epoch}")
        return range(k * self.global_size, min((k + 1) * self.global_size, self.samples))

    def share(self, k: int, rank: int) -> range:
        """Positions of window ``k`` that ``rank`` computes. Shares differ by at most one sample."""
        window = self.window(k)
        begin, end = (len(window) * r // self.world_size for r in (rank, rank + 1))
        return window[begin:end]

    def micro_steps(self, k: int) -> int:
        """Micro-steps of window ``k``: the same on every rank, so that collectives match."""
        largest_share = -(-len(self.window(k)) // self.world_size)
        return -(-largest_share // self.micro_size)

    def micro_batches(self, k: int, rank: int) -> list[range]:
        """The micro-batches of ``rank`` in window ``k``; empty ranges where the rank has nothing left."""
        share = self.share(k, rank)
        return [share[i * self.micro_size : (i + 1) * self.micro_size] for i in range(self.micro_steps(k))]

    def as_dict(self) -> dict[str, int]:
        """The plan as written to ``plan.json``."""
        return asdict(self) | {
            "accumulation_steps": self.accumulation_steps,
            "windows_per_epoch": self.windows_per_epoch,
            "last_window_size": len(self.window(self.windows_per_epoch - 1)),
        }
