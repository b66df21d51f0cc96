"""Divides samples into windows whose global batch follows a schedule: pure arithmetic, no torch.

The windows are counted from the start of the run, over all epochs. Which samples one of them holds is a function of the
schedule, the number of samples and, where a stage lasts for tokens, their lengths and order: of neither the world size,
nor the micro-batch size, nor of what the training does.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any, NamedTuple

import numpy as np

from distaccum.data.plan.batch import (
    KEYWORDS,
    BatchPlan,
    Epoch,
    Ids,
    Plan,
    SizeNames,
    as_written,
    check_samples,
    check_sizes,
    describe_steps,
    micro_batches_of,
    micro_steps_of,
    seed_number,
)
from distaccum.data.plan.shuffle import Weights
from distaccum.errors import ConfigError


@dataclass(frozen=True)
class Stage:
    """A global batch, and how long it holds: for ``lasts`` updates, or until as many samples or tokens are taken.

    ``unit`` is ``updates``, ``samples`` or ``tokens``; a window is an update here, applied or not. A stage
    ends with a window: with the first one after which it has lasted so long.
    """

    global_batch_size: int
    lasts: int
    unit: str

    def __str__(self) -> str:
        return f"{self.global_batch_size} for {self.lasts:,} {self.unit}"


class _Place(NamedTuple):
    """The stage that an epoch begins in, and how much of it is over; after the last stage its number."""

    stage: int
    done: int


class _Part(NamedTuple):
    """Windows of one size in an epoch: the first one's number, and its first sample's position."""

    window: int
    position: int
    size: int


@dataclass(frozen=True, kw_only=True)
class ScheduledPlan(Plan):
    """A plan like :class:`BatchPlan` whose global batch has another size in the stages that the run begins with.

    An epoch goes on where a stage ends: no sample is taken twice, and none is left out.

    Args:
        samples: N, samples per epoch over all ranks.
        stages: what comes first, in order.
        global_batch_size: after the last stage.
        micro_batch_size: the most samples one forward/backward on one rank takes; more than a stage has, if need be.
        world_size: number of ranks.
        lengths: tokens of each sample, shape ``(samples,)``; one number where all have as many; None where not known,
            and no stage is stated in tokens.
        seed: for the order of samples, which differs every epoch; None for the dataset's own order.
        weights: by which an epoch's samples are drawn; None: each comes once.
        names: what an error calls the sizes.

    Raises:
        ConfigError: a size is below 1, the micro-batch is larger than the largest global batch, or there are no
            samples.
    """

    samples: int
    stages: tuple[Stage, ...]
    global_batch_size: int
    micro_batch_size: int
    world_size: int
    lengths: Ids | int | None = None
    seed: int | None = None
    weights: Weights | None = None
    names: InitVar[SizeNames] = KEYWORDS
    _begins: list[_Place] = field(default_factory=lambda: [_Place(0, 0)], init=False, repr=False, compare=False)

    def __post_init__(self, names: SizeNames) -> None:
        check_sizes(self.global_batch_size, min(1, self.micro_batch_size), names)
        if self.micro_batch_size > self.largest:
            problem = f"larger than every global batch of {self}"
            remedy = "One micro-batch cannot exceed the optimizer step it is part of: lower it"
            raise ConfigError(names.micro_batch_size, self.micro_batch_size, problem, remedy)
        check_samples(self.samples)
        assert self.lengths is not None or all(stage.unit != "tokens" for stage in self.stages)

    @property
    def largest(self) -> int:
        """The most samples of a window."""
        return max(self.global_batch_size, *(stage.global_batch_size for stage in self.stages))

    @property
    def rows(self) -> int:
        """See :class:`Plan`."""
        return min(self.micro_batch_size, -(-self.largest // self.world_size))

    def evenly(self) -> BatchPlan:
        """See :class:`Plan`."""
        return self._by_samples(BatchPlan, self.largest)

    def epoch(self, epoch: int) -> Epoch:
        """The epoch's windows; O(samples) in those with a stage that lasts for tokens."""
        self._walk(epoch)
        return self._divide(epoch, self._begins[min(epoch, len(self._begins) - 1)])[0]

    def _walk(self, epoch: int) -> None:
        """Notes the places in which the epochs up to this one begin, as far as they are in a stage."""
        while len(self._begins) <= epoch and self._begins[-1].stage < len(self.stages):
            self._begins.append(self._divide(len(self._begins) - 1, self._begins[-1])[1])

    def _divide(self, epoch: int, place: _Place) -> tuple[_Epoch, _Place]:
        """An epoch that begins in ``place``, and the place that the next one begins in."""
        (stage, done), parts, window, position = place, list[_Part](), 0, 0
        while position < self.samples:
            now = self.stages[stage] if stage < len(self.stages) else None
            size = self.global_batch_size if now is None else now.global_batch_size
            windows = -(-(self.samples - position) // size)
            if now is not None:
                windows = min(windows, self._windows(now, now.lasts - done, epoch, position))
            parts.append(_Part(window, position, size))
            end = min(position + windows * size, self.samples)
            if now is not None:
                done += self._between(now, windows, epoch, position, end)
                stage, done = (stage, done) if done < now.lasts else (stage + 1, 0)
            window, position = window + windows, end
        return _Epoch(plan=self, parts=parts, windows_per_epoch=window), _Place(stage, done)

    def _windows(self, stage: Stage, left: int, epoch: int, position: int) -> int:
        """The windows of a stage from ``position`` on, where ``left`` of it are left and the epoch is long enough."""
        if stage.unit == "updates":
            return left
        if stage.unit == "tokens" and isinstance(self.lengths, int):
            left = -(-left // self.lengths)
        elif stage.unit == "tokens":
            tokens = self._tokens(epoch)
            end = int(tokens[position]) + left  # beyond 64 bits, if need be
            left = (self.samples + 1 if end > tokens[-1] else int(np.searchsorted(tokens, end))) - position
        return -(-left // stage.global_batch_size)

    def _between(self, stage: Stage, windows: int, epoch: int, begin: int, end: int) -> int:
        """How much of a stage these windows are, in its unit."""
        if stage.unit == "tokens" and not isinstance(self.lengths, int):
            tokens = self._tokens(epoch)
            return int(tokens[end] - tokens[begin])
        each = self.lengths if stage.unit == "tokens" else 1
        assert isinstance(each, int)
        return windows if stage.unit == "updates" else (end - begin) * each

    def _tokens(self, epoch: int) -> Ids:
        """The tokens before each position of the epoch's order, and of all."""
        assert isinstance(self.lengths, np.ndarray)
        ordered = self.lengths[self.ids(epoch, np.arange(self.samples))]
        return np.concatenate([[0], np.cumsum(ordered)])

    def updates(self, epochs: int) -> int:
        """Windows in the first ``epochs`` epochs."""
        self._walk(epochs)
        staged = min(epochs, len(self._begins) - 1)  # the others are all alike
        alike = 0 if staged == epochs else (epochs - staged) * self.epoch(staged).windows_per_epoch
        return sum(self.epoch(epoch).windows_per_epoch for epoch in range(staged)) + alike

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.stages))}, then {self.global_batch_size}"

    @property
    def _stated(self) -> list[dict[str, Any]]:
        """The stages as they are configured."""
        return [{"global_size": stage.global_batch_size, stage.unit: stage.lasts} for stage in self.stages]

    @property
    def position(self) -> dict[str, Any]:
        """The numbers that give a window's index its meaning; the size in words, so that it fits no other plan."""
        found = {"batch.schedule": self._stated, "batch.global_size": str(self), "samples": self.samples}
        if any(stage.unit == "tokens" for stage in self.stages):
            one = isinstance(self.lengths, int)
            lengths = self.lengths if one else zlib.crc32(np.ascontiguousarray(self.lengths, dtype=np.int64).tobytes())
            found["tokens of a sample" if one else "tokens of each sample (a hash)"] = lengths
        return found | {"seed": seed_number(self.seed, self.weights)}

    def as_dict(self) -> dict[str, Any]:
        """The plan as written to ``plan.json``; windows are those of the first epoch, micro-steps the largest one's."""
        steps = micro_steps_of(range(self.largest), self.world_size, self.micro_batch_size)
        return as_written(self, self.epoch(0), "samples", self.global_batch_size, steps, schedule=self._stated)

    def describe(self) -> list[str]:
        """The plan in words, one line per fact."""
        plan = self.as_dict()
        update = f"global batch {self} samples = up to {describe_steps(self, plan['accumulation_steps'])}"
        return [update, f"{self.samples:,} samples in {plan['windows_per_epoch']} steps (the first epoch)"]


@dataclass(frozen=True, kw_only=True)
class _Epoch:
    """An epoch whose windows have the sizes of ``parts``, one after the other."""

    plan: ScheduledPlan
    parts: Sequence[_Part]
    windows_per_epoch: int

    def window(self, k: int) -> range:
        if not 0 <= k < self.windows_per_epoch:
            raise IndexError(f"window {k} of an epoch of {self.windows_per_epoch}")
        part = self.parts[bisect_right(self.parts, k, key=lambda part: part.window) - 1]
        begin = part.position + (k - part.window) * part.size
        return range(begin, min(begin + part.size, self.plan.samples))

    def micro_batches(self, k: int, rank: int) -> list[range]:
        return micro_batches_of(self.window(k), rank, self.plan.world_size, self.plan.micro_batch_size)
