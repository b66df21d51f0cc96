"""A plan whose global batch has changed in the middle of an epoch: pure arithmetic, no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from distaccum.data.plan.batch import BatchPlan, Epoch, micro_batches_of


@dataclass(frozen=True, kw_only=True)
class Resize:
    """A change of the global batch: from ``window`` of ``epoch`` on, where ``position`` samples of it are done."""

    global_batch_size: int
    epoch: int
    window: int
    position: int

    def position_of(self, epoch: int, window: int) -> int:
        """The samples of ``epoch`` in the windows before ``window``, one of those that the change is about."""
        since, done = (self.window, self.position) if epoch == self.epoch else (0, 0)
        return done + (window - since) * self.global_batch_size


@dataclass(frozen=True, kw_only=True)
class ResizedPlan(BatchPlan):
    """A plan with another global batch since a window: no sample is taken twice, and none is left out.

    In the epoch of the change window ``k`` covers ``global_batch_size`` samples from ``since.position_of(epoch, k)``
    on; the windows before the change are done, and have no positions. Later epochs are a :class:`BatchPlan`'s.

    Args:
        since: the last change; its size is ``global_batch_size``.
    """

    since: Resize

    def epoch(self, epoch: int) -> Epoch:
        """The windows of an epoch: a rest of one, with the numbers that follow, in the epoch of the change."""
        if epoch != self.since.epoch or not self.since.window:
            return self
        return _Rest(plan=self, since=self.since)

    @property
    def position(self) -> dict[str, Any]:
        """See :class:`BatchPlan`."""
        return super().position | {"resized": asdict(self.since)}

    def as_dict(self) -> dict[str, Any]:
        """The plan as written to ``plan.json``: of the epochs after the change."""
        return super().as_dict() | {"resized": asdict(self.since)}

    def describe(self) -> list[str]:
        """The plan in words."""
        change = f"since window {self.since.window} of epoch {self.since.epoch}, at sample {self.since.position}"
        return [*super().describe(), change]


@dataclass(frozen=True, kw_only=True)
class _Rest:
    """The windows of an epoch from a change on."""

    plan: BatchPlan
    since: Resize

    @property
    def windows_per_epoch(self) -> int:
        left = self.plan.samples - self.since.position
        return self.since.window + max(0, -(-left // self.plan.global_batch_size))

    def window(self, k: int) -> range:
        if not self.since.window <= k < self.windows_per_epoch:
            raise IndexError(f"window {k} of windows {self.since.window} to {self.windows_per_epoch - 1}")
        begin = self.since.position_of(self.since.epoch, k)
        return range(begin, min(begin + self.plan.global_batch_size, self.plan.samples))

    def micro_batches(self, k: int, rank: int) -> list[range]:
        return micro_batches_of(self.window(k), rank, self.plan.world_size, self.plan.micro_batch_size)
