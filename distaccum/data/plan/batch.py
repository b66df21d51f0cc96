"""Divides samples into windows, rank shares and micro-batches: pure arithmetic, no torch, no state.

Window ``k`` of an epoch covers the positions ``[k*G, min((k+1)*G, N))`` of that epoch's order, whatever the world size.
Ranks slice the window, micro-steps slice the rank's share. A position is a function of ``(seed, epoch, window)`` alone,
so resuming and changing the world size are arithmetic.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import InitVar, asdict, dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from distaccum.data.plan.shuffle import Shuffle, Weights
from distaccum.errors import ConfigError

Ids = NDArray[np.int64]
P = TypeVar("P", bound="Plan")
_LOOKED_AT, _RECKONED = 1000, 100  # windows


class SizeNames(NamedTuple):
    """What the user calls the sizes, so that an error names what was typed."""

    global_batch_size: str
    micro_batch_size: str
    tokens: str
    micro_tokens: str


KEYWORDS = SizeNames("global_batch_size", "micro_batch_size", "tokens", "micro_batch_tokens")
CONFIG_KEYS = SizeNames("batch.global_size", "batch.micro_size", "batch.tokens", "batch.micro_tokens")


class Epoch(Protocol):
    """One epoch, divided into windows."""

    @property
    def windows_per_epoch(self) -> int:
        """Number of windows; the last one may be ragged."""

    def window(self, k: int) -> range:
        """Positions of window ``k`` in the epoch's order, over all ranks."""

    def micro_batches(self, k: int, rank: int) -> Sequence[range | Ids]:
        """The micro-batches of ``rank`` in window ``k``, by positions; empty ones where the rank has nothing left."""


class Plan(ABC):
    """The division of a map-style dataset: by samples (:class:`BatchPlan`) or by tokens (``TokenPlan``).

    A :class:`CutPlan` is another one, whose micro-batches are cut otherwise. What is not abstract answers for windows
    that are cut by samples, and whose plan is a dataclass.
    """

    is_stream: Literal[False] = False
    """Whether the samples are a stream's; a :class:`~distaccum.data.plan.stream.StreamPlan` is no ``Plan``."""
    has_units: ClassVar[bool] = False
    """Whether micro-batches are units, which are the same on any number of ranks."""

    if TYPE_CHECKING:  # of some plans fields

        @property
        @abstractmethod
        def samples(self) -> int:
            """Samples per epoch over all ranks."""

        @property
        @abstractmethod
        def micro_batch_size(self) -> int:
            """The most samples one forward/backward on one rank takes."""

        @property
        @abstractmethod
        def world_size(self) -> int:
            """Number of ranks."""

        @property
        @abstractmethod
        def seed(self) -> int | None:
            """Seed of the order of samples; None for the dataset's own order."""

        @property
        def weights(self) -> Weights | None:
            """By which samples are drawn; None where each comes once an epoch."""

    @property
    @abstractmethod
    def position(self) -> dict[str, Any]:
        """The numbers that give a window's index its meaning."""

    @abstractmethod
    def epoch(self, epoch: int, /) -> Epoch:
        """One epoch's windows."""

    @abstractmethod
    def updates(self, epochs: int) -> int:
        """Windows in the first ``epochs`` epochs."""

    def ids(self, epoch: int, positions: Ids) -> Ids:
        """The samples at these positions of an epoch's order."""
        if self.seed is None:
            return positions
        if self.weights is not None:
            return self.weights.draw(self.seed, epoch, positions)
        return Shuffle(self.samples, seed=self.seed, epoch=epoch)(positions)

    @abstractmethod
    def as_dict(self) -> dict[str, Any]:
        """The plan as written to ``plan.json``."""

    @abstractmethod
    def describe(self) -> list[str]:
        """The plan in words, one line per fact."""

    @property
    def rows(self) -> int:
        """The samples of a rank's largest micro-batch."""
        return self.micro_batch_size

    @property
    def largest(self) -> int:
        """The most samples of a window, where windows of later epochs are larger; else 0."""
        return 0

    @property
    def first_whole_epoch(self) -> int:
        """The first epoch all of whose windows are planned."""
        return 0

    @property
    def items_of_window(self) -> int:
        """Micro-batches of a rank's largest window; of limits of tokens in epoch 0."""
        steps: int = self.as_dict()["accumulation_steps"]
        return steps

    @property
    def micro_batch_key(self) -> dict[str, int]:
        """What cuts micro-batches, by its key."""
        return {"batch.unit_size": self.micro_batch_size}

    @property
    def micro_batch_in_words(self) -> str:
        """The most that a micro-batch holds."""
        return f"{self.micro_batch_size} samples"

    @property
    def limit_of_tokens(self) -> dict[str, int]:
        """The limit of a micro-batch in tokens, by the name that an error has for it; empty without one."""
        return {}

    def samples_like(self, sample: int) -> Fraction:
        """How many samples as long as this one a micro-batch holds at most."""
        return Fraction(self.rows)

    def for_ranks(self, ranks: int) -> Plan:
        """The plan as another number of ranks has it."""
        return self._with(world_size=ranks)

    def resized(self, change: Resize) -> Plan | None:
        """The plan with another global batch since a window; None where windows are cut by tokens or a schedule."""
        return None

    def with_micro_batch(self, size: int) -> Plan:
        """The plan with micro-batches of up to ``size`` samples, or as many tokens as so many of the longest have."""
        return self._with(micro_batch_size=size)

    def grouped_by_length(self, lengths: Ids | None) -> Plan:
        """The plan with samples of similar length in a micro-batch; without ``lengths`` as they come."""
        return self if lengths is None else GroupedPlan(plan=self, lengths=lengths)

    def evenly(self) -> Plan:
        """The plan with windows that are all as large as its largest."""
        return self

    def _by_samples(self, kind: Callable[..., P], global_batch_size: int, **more: Any) -> P:
        """A plan of the same samples and their order, whose windows are of one size."""
        sizes: dict[str, Any] = {"micro_batch_size": self.micro_batch_size, "world_size": self.world_size}
        order: dict[str, Any] = {"samples": self.samples, "seed": self.seed, "weights": self.weights}
        return kind(global_batch_size=global_batch_size, **sizes, **order, **more)

    def _with(self, **changes: Any) -> Plan:
        other: Plan = replace(cast(Any, self), **changes)
        return other


class CutPlan(Plan):
    """The windows of another ``plan``, cut into other micro-batches."""

    plan: Plan

    @property
    def samples(self) -> int:
        """Samples per epoch over all ranks."""
        return self.plan.samples

    @property
    def micro_batch_size(self) -> int:
        """The plan's: the most samples of a micro-batch of an evaluation; of training where that is limited, too."""
        return self.plan.micro_batch_size

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.plan.world_size

    @property
    def seed(self) -> int | None:
        """Seed of the order of samples."""
        return self.plan.seed

    @property
    def rows(self) -> int:
        """See :class:`Plan`."""
        return self.plan.rows

    @property
    def first_whole_epoch(self) -> int:
        """See :class:`Plan`."""
        return self.plan.first_whole_epoch

    @property
    def position(self) -> dict[str, Any]:
        """The numbers that give a window's index its meaning: not how it is cut."""
        return self.plan.position

    def updates(self, epochs: int) -> int:
        """Windows in the first ``epochs`` epochs."""
        return self.plan.updates(epochs)

    def ids(self, epoch: int, positions: Ids) -> Ids:
        """The samples at these positions of an epoch's order."""
        return self.plan.ids(epoch, positions)

    def for_ranks(self, ranks: int) -> Plan:
        """See :class:`Plan`."""
        return self._with(plan=self.plan.for_ranks(ranks))

    def resized(self, change: Resize) -> Plan | None:
        """See :class:`Plan`."""
        windows = self.plan.resized(change)
        return None if windows is None else self._with(plan=windows)

    def with_micro_batch(self, size: int) -> Plan:
        """See :class:`Plan`."""
        return self._with(plan=self.plan.with_micro_batch(size))

    def grouped_by_length(self, lengths: Ids | None) -> Plan:
        """See :class:`Plan`."""
        return self._with(plan=self.plan.grouped_by_length(lengths))

    def cut_into(self, steps: str) -> list[str]:
        """The windows in words, each of a rank's cut into these micro-steps."""
        update, *others = self.plan.describe()
        batch, _, _ = update.partition(" = ")
        return [f"{batch} = {describe_ranks(self.world_size)} x {steps}", *others]


@dataclass(frozen=True, kw_only=True)
class CutEpoch:
    """An epoch of another plan's ``windows``, which ``plan`` cuts into other micro-batches."""

    plan: CutPlan
    epoch: int
    windows: Epoch

    @property
    def windows_per_epoch(self) -> int:
        """Number of windows."""
        return self.windows.windows_per_epoch

    def window(self, k: int) -> range:
        """Positions of window ``k`` in the epoch's order."""
        return self.windows.window(k)

    def lengths_at(self, positions: range | Ids, lengths: Ids) -> Ids:
        """Those of the samples at these positions, where ``lengths`` are all samples'."""
        return lengths[self.plan.ids(self.epoch, np.asarray(positions, dtype=np.int64))]

    def longest_first(self, k: int, lengths: Ids) -> Ids:
        """The positions of window ``k`` by the length of their samples."""
        positions = np.asarray(self.window(k), dtype=np.int64)
        return positions[np.argsort(-self.lengths_at(positions, lengths), kind="stable")]


@dataclass(frozen=True, kw_only=True)
class GroupedPlan(CutPlan):
    """The windows of another plan, whose micro-batches are as large as its own, of samples of similar length.

    A window is sorted by length, and dealt to the ranks micro-step by micro-step: every rank gets some of every length,
    and all finish at about the same time.

    Args:
        plan: of the windows, which cuts them in order.
        lengths: tokens of each sample, shape ``(samples,)``.
    """

    plan: Plan
    lengths: Ids
    grouped: ClassVar[bool] = True

    def epoch(self, epoch: int) -> Epoch:
        """The epoch's windows."""
        return _GroupedEpoch(plan=self, epoch=epoch, windows=self.plan.epoch(epoch))

    @property
    def largest(self) -> int:
        """See :class:`Plan`."""
        return self.plan.largest

    def grouped_by_length(self, lengths: Ids | None) -> Plan:
        """See :class:`Plan`."""
        return self.plan.grouped_by_length(lengths)

    def as_dict(self) -> dict[str, Any]:
        """The plan as written to ``plan.json``."""
        return self.plan.as_dict()

    def describe(self) -> list[str]:
        """The plan in words, one line per fact."""
        return self.plan.describe()


@dataclass(frozen=True, kw_only=True)
class _GroupedEpoch(CutEpoch):
    plan: GroupedPlan

    def in_turn(self, k: int) -> list[Ids]:
        """The window's micro-batches, which go to one rank after the other."""
        ranks = range(self.plan.world_size)
        sizes = np.array([[len(part) for part in self.windows.micro_batches(k, each)] for each in ranks])
        return np.split(self.longest_first(k, self.plan.lengths), np.cumsum(sizes.T.ravel())[:-1])

    def micro_batches(self, k: int, rank: int) -> list[Ids]:
        return self.in_turn(k)[rank :: self.plan.world_size]


@dataclass(frozen=True, kw_only=True)
class BatchPlan(Plan):
    """The division of each epoch's samples into windows, rank shares and micro-batches.

    Args:
        samples: N, samples per epoch over all ranks.
        global_batch_size: G, samples per optimizer step over all ranks. N need not be a multiple of it.
        micro_batch_size: the most samples one forward/backward on one rank takes.
        world_size: number of ranks. G need not be a multiple of it.
        seed: for the order of samples, which differs every epoch; None for the dataset's own order.
        weights: by which an epoch's samples are drawn; None: each comes once.
        names: what an error calls the sizes.

    Raises:
        ConfigError: a size is below 1, the micro-batch is larger than the global batch, or there are no samples.
    """

    samples: int
    global_batch_size: int
    micro_batch_size: int
    world_size: int
    seed: int | None = None
    weights: Weights | None = None
    names: InitVar[SizeNames] = KEYWORDS

    def __post_init__(self, names: SizeNames) -> None:
        check_sizes(self.global_batch_size, self.micro_batch_size, names)
        check_samples(self.samples)
        assert self.world_size >= 1

    @property
    def windows_per_epoch(self) -> int:
        """Optimizer steps in an epoch; the last one may be ragged."""
        return -(-self.samples // self.global_batch_size)

    @property
    def accumulation_steps(self) -> int:
        """Micro-steps of a full window on every rank: derived, never configured."""
        return self.micro_steps(0)

    def epoch(self, _: int) -> Epoch:
        """The plan itself: every epoch has the same windows."""
        return self

    def updates(self, epochs: int) -> int:
        """Windows in the first ``epochs`` epochs."""
        return epochs * self.windows_per_epoch

    def window(self, k: int) -> range:
        """Positions of window ``k`` in the epoch's order, over all ranks."""
        if not 0 <= k < self.windows_per_epoch:
            raise IndexError(f"window {k} of an epoch of {self.windows_per_epoch}")
        return range(k * self.global_batch_size, min((k + 1) * self.global_batch_size, self.samples))

    def share(self, k: int, rank: int) -> range:
        """Positions of window ``k`` that ``rank`` computes. Shares differ by at most one sample."""
        return share_of(self.window(k), rank, self.world_size)

    def micro_steps(self, k: int) -> int:
        """Micro-steps of the rank with the largest share of window ``k``."""
        return micro_steps_of(self.window(k), self.world_size, self.micro_batch_size)

    def micro_batches(self, k: int, rank: int) -> list[range]:
        """The micro-batches of ``rank`` in window ``k``; empty ranges where the rank has nothing left."""
        return micro_batches_of(self.window(k), rank, self.world_size, self.micro_batch_size)

    @property
    def rows(self) -> int:
        """See :class:`Plan`."""
        return min(self.micro_batch_size, -(-self.global_batch_size // self.world_size))

    def evenly(self) -> BatchPlan:
        """See :class:`Plan`."""
        return self._by_samples(BatchPlan, self.global_batch_size)

    def resized(self, change: Resize) -> ResizedPlan:
        """See :class:`Plan`.

        Raises:
            ConfigError: the global batch is smaller than the micro-batch.
        """
        return self._by_samples(ResizedPlan, change.global_batch_size, since=change)

    @property
    def position(self) -> dict[str, Any]:
        """The numbers that give a window's index its meaning."""
        order = seed_number(self.seed, self.weights)
        return {"batch.global_size": self.global_batch_size, "samples": self.samples, "seed": order}

    def as_dict(self) -> dict[str, Any]:
        """The plan as written to ``plan.json``."""
        return as_written(self, self, "samples", self.global_batch_size, self.accumulation_steps)

    def describe(self) -> list[str]:
        """The plan in words, one line per fact."""
        tail = len(self.window(self.windows_per_epoch - 1))
        update = f"global batch {self.global_batch_size} samples = {describe_steps(self, self.accumulation_steps)}"
        return [update, f"{self.samples:,} samples in {self.windows_per_epoch} steps, the last of {tail}"]


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
    def first_whole_epoch(self) -> int:
        """See :class:`Plan`."""
        return self.since.epoch + 1

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


def share_of(window: range, rank: int, world_size: int) -> range:
    """The positions of a window that ``rank`` computes."""
    samples = len(window)
    return window[samples * rank // world_size : samples * (rank + 1) // world_size]


def largest_share(plan: Plan) -> int:
    """The most samples that a rank has in a window: of the first windows, and of the largest that is planned."""
    cut = plan.epoch(0)
    largest = max(len(cut.window(k)) for k in range(min(_LOOKED_AT, cut.windows_per_epoch)))
    return -(-max(largest, plan.largest) // plan.world_size)


def spread(windows: int) -> list[int]:
    """The numbers of 100 of so many windows at most, spread over them: those after which micro-steps are reckoned."""
    found: list[int] = np.linspace(0, windows - 1, min(windows, _RECKONED)).astype(int).tolist()
    return found


def micro_steps_of(window: range, world_size: int, micro_batch_size: int) -> int:
    """Micro-steps of the rank with the largest share of a window."""
    largest_share = -(-len(window) // world_size)
    return -(-largest_share // micro_batch_size)


def micro_batches_of(window: range, rank: int, world_size: int, micro_batch_size: int) -> list[range]:
    """The micro-batches of ``rank`` in a window; empty ranges at the end where it has less than other ranks."""
    share = share_of(window, rank, world_size)
    return [
        share[i * micro_batch_size : (i + 1) * micro_batch_size]
        for i in range(micro_steps_of(window, world_size, micro_batch_size))
    ]


def seed_number(seed: int | None, weights: Weights | None) -> int | str:
    """The seed as a plain number, -1 for the dataset's own order; with ``weights`` in words, which fit no others."""
    number = -1 if seed is None else seed
    return number if weights is None else f"{number}, of weights {weights.digest:08x} (a hash)"


def check_sizes(global_batch_size: int | None, micro_batch_size: int, names: SizeNames = KEYWORDS) -> None:
    """Raises ConfigError if a size is below 1, or the micro-batch is larger than the global batch."""
    for key, value in ((names.global_batch_size, global_batch_size), (names.micro_batch_size, micro_batch_size)):
        if value is not None and value < 1:
            raise ConfigError(key, value, "must be at least 1", "State a positive number of samples")
    if global_batch_size is not None and micro_batch_size > global_batch_size:
        raise ConfigError(
            names.micro_batch_size,
            micro_batch_size,
            f"larger than {names.global_batch_size}={global_batch_size}",
            "One micro-batch cannot exceed the optimizer step it is part of: lower the one or raise the other",
        )


def check_samples(samples: int) -> None:
    """Raises ConfigError if the training set is empty."""
    if samples < 1:
        raise ConfigError("data", None, "the training set holds no samples", "Point it at data with some")


def as_written(
    plan: Plan, first: Epoch, unit: str, global_size: int, accumulation_steps: int, **stated: object
) -> dict[str, Any]:
    """A plan as written to ``plan.json``, whose windows are those of its ``first`` epoch."""
    return {
        "unit": unit,
        "samples": plan.samples,
        **stated,
        "global_size": global_size,
        "micro_size": plan.micro_batch_size,
        "world_size": plan.world_size,
        "accumulation_steps": accumulation_steps,
        "windows_per_epoch": first.windows_per_epoch,
        "last_window_size": len(first.window(first.windows_per_epoch - 1)),
    }


class _Sizes(Protocol):
    @property
    def micro_batch_size(self) -> int: ...

    @property
    def world_size(self) -> int: ...


def describe_steps(plan: _Sizes, steps: int) -> str:
    """Ranks and micro-steps of one update, in words."""
    ranks = describe_ranks(plan.world_size)
    return f"{ranks} x {steps} micro-step{'' if steps == 1 else 's'} of at most {plan.micro_batch_size}"


def describe_ranks(world_size: int) -> str:
    """Their number, in words."""
    return "1 rank" if world_size == 1 else f"{world_size} ranks"
