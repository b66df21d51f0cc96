"""Divides samples into windows of at most a number of tokens: pure arithmetic, no torch, no state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np

from distaccum.data.plan.batch import (
    KEYWORDS,
    CutEpoch,
    CutPlan,
    Epoch,
    Ids,
    Plan,
    SizeNames,
    as_written,
    check_samples,
    check_sizes,
    describe_steps,
    micro_batches_of,
    seed_number,
    share_of,
    spread,
)
from distaccum.data.plan.shuffle import Weights
from distaccum.errors import ConfigError

# Cuts windows into micro-batches of at most a number of padded tokens: pure arithmetic, no torch, no state.
#
# A forward's time and memory follow its padded tokens, the number of samples times the length of the longest, not the
# number of samples. So a limit of tokens puts many short samples into a micro-batch, and few long ones.

TokensOf = Callable[[Ids], int]
"""From the lengths of a micro-batch's samples to its tokens, padding included; no fewer with one sample more."""


def cut_in_order(lengths: Ids, most: int, tokens_of: TokensOf, *, samples: int | None = None) -> list[int]:
    """How many samples each micro-batch takes, one after the other: as many as fit, and at least one.

    Args:
        lengths: tokens of each sample in the order in which they are taken, shape ``(samples,)``.
        most: padded tokens of a micro-batch.
        tokens_of: of a micro-batch.
        samples: the most of a micro-batch; None: any number.
    """
    sizes: list[int] = []
    begin = 0
    while begin < len(lengths):
        left = lengths[begin:] if samples is None else lengths[begin : begin + samples]
        sizes.append(_fitting(left, most, tokens_of))
        begin += sizes[-1]
    return sizes


def _fitting(lengths: Ids, most: int, tokens_of: TokensOf) -> int:
    """How many of the first samples fit together, and at least one: the number is doubled, then bisected."""
    fits, fails = 1, len(lengths) + 1
    while fails - fits > 1:
        tried = min(2 * fits, (fits + fails) // 2)
        if tokens_of(lengths[:tried]) <= most:
            fits = tried
        else:
            fails = tried
    return fits


def divisible(sizes: Sequence[int], ranks: int) -> list[int]:
    """The sizes of micro-batches, of which the largest are halved until every rank gets as many of them.

    With fewer samples than that takes, every micro-batch has one. A half is padded to no more than the whole was.

    Args:
        sizes: samples of each micro-batch, in order.
        ranks: how many the micro-batches are dealt to, in turn.
    """
    found = list(sizes)
    while len(found) % ranks and max(found) > 1:
        largest = found.index(max(found))
        size = found[largest]
        found[largest : largest + 1] = [size - size // 2, size // 2]
    return found


@dataclass(frozen=True, kw_only=True)
class MicroTokenPlan(CutPlan):
    """The windows of another plan, whose micro-batches hold at most a number of padded tokens.

    Which samples a window holds is the other plan's, and so is the position: a checkpoint goes on with any limit. A
    rank's share of a window is cut in order; where samples are grouped, the whole window is sorted by length, cut, and
    dealt to the ranks in turn, to each as many micro-batches as there are samples for.

    Args:
        plan: of the windows.
        lengths: tokens of each sample, shape ``(samples,)``.
        micro_tokens: the most padded tokens of a micro-batch.
        tokens_of: of a micro-batch, as it is collated.
        grouped: whether micro-batches hold samples of similar length.
        limits_samples: whether a micro-batch holds no more than the plan's ``micro_batch_size`` samples, too.
        names: what an error calls the sizes.

    Raises:
        ConfigError: the limit is below 1, or the longest sample alone has more tokens.
    """

    plan: Plan
    lengths: Ids
    micro_tokens: int
    tokens_of: TokensOf
    grouped: bool = False
    limits_samples: bool = True
    names: SizeNames = field(default=KEYWORDS, repr=False, compare=False)

    def __post_init__(self) -> None:
        key = self.names.micro_tokens
        if self.micro_tokens < 1:
            raise ConfigError(key, self.micro_tokens, "must be at least 1", "State a positive number of tokens")
        longest = self.lengths.max(keepdims=True)
        if (padded := self.tokens_of(longest)) > self.micro_tokens:
            padding = f", which are padded to {padded}" if padded != longest[0] else ""
            problem = f"the longest sample has {longest[0]} tokens{padding}"
            raise ConfigError(key, self.micro_tokens, problem, f"Give at least {padded}, or cut the samples")

    def epoch(self, epoch: int) -> Epoch:
        """The epoch's windows."""
        return self._of(self.plan, epoch)

    def _of(self, plan: Plan, epoch: int) -> _CutEpoch:
        return _CutEpoch(plan=self, epoch=epoch, windows=plan.epoch(epoch))

    def cut(self, lengths: Ids) -> list[int]:
        """How many samples each micro-batch takes of samples of these lengths, in order."""
        most = self.micro_batch_size if self.limits_samples else None
        return cut_in_order(lengths, self.micro_tokens, self.tokens_of, samples=most)

    @property
    def rows(self) -> int:
        """The most samples of a micro-batch, if all were of the shortest."""
        shortest = self.tokens_of(self.lengths.min(keepdims=True))
        most = min(self.samples, self.micro_tokens // max(1, shortest))
        return min(most, self.micro_batch_size) if self.limits_samples else most

    @property
    def micro_batch_key(self) -> dict[str, int]:
        """See :class:`Plan`."""
        return {"batch.micro_tokens": self.micro_tokens}

    @property
    def micro_batch_in_words(self) -> str:
        """See :class:`Plan`."""
        return f"{self.micro_tokens:,} padded tokens"

    @property
    def limit_of_tokens(self) -> dict[str, int]:
        """See :class:`Plan`."""
        return {self.names.micro_tokens: self.micro_tokens}

    def samples_like(self, sample: int) -> Fraction:
        """See :class:`Plan`."""
        return Fraction(self.micro_tokens, max(1, self.tokens_of(self.lengths[[sample]])))

    def with_micro_batch(self, size: int) -> MicroTokenPlan:
        """See :class:`Plan`."""
        return replace(self, micro_tokens=self.tokens_of(np.full(size, self.lengths.max())))

    def grouped_by_length(self, lengths: Ids | None) -> MicroTokenPlan:
        """See :class:`Plan`."""
        return replace(self, grouped=lengths is not None)

    @cached_property
    def micro_steps(self) -> int:
        """The most micro-steps of a rank among windows of the first epoch, 100 at most, spread over it.

        Where windows differ in their number of samples, they are reckoned as large as the largest.
        """
        cut = self._of(self.plan.evenly(), 0)
        return max(cut.micro_steps(k) for k in spread(cut.windows_per_epoch))

    def as_dict(self) -> dict[str, Any]:
        """The plan as written to ``plan.json``: its micro-steps are :attr:`micro_steps`."""
        size = self.micro_batch_size if self.limits_samples else None
        mine = {"micro_size": size, "micro_tokens": self.micro_tokens, "accumulation_steps": self.micro_steps}
        return self.plan.as_dict() | mine

    def describe(self) -> list[str]:
        """The plan in words, one line per fact."""
        steps = "about 1 micro-step" if self.micro_steps == 1 else f"about {self.micro_steps} micro-steps"
        samples = f" and {self.micro_batch_size} samples" if self.limits_samples else ""
        return self.cut_into(f"{steps} of at most {self.micro_tokens:,} padded tokens{samples}")


@dataclass(frozen=True, kw_only=True)
class _CutEpoch(CutEpoch):
    plan: MicroTokenPlan

    def micro_steps(self, k: int) -> int:
        """Of the rank with the most."""
        window, ranks = self.window(k), self.plan.world_size
        lengths = self.lengths_at(window, self.plan.lengths)
        if self.plan.grouped:
            return -(-len(self.plan.cut(-np.sort(-lengths))) // ranks)
        shares = (share_of(range(len(window)), rank, ranks) for rank in range(ranks))
        return max(len(self.plan.cut(lengths[share.start : share.stop])) for share in shares)

    def in_turn(self, k: int) -> list[Ids]:
        """The window's micro-batches of samples of similar length, which go to one rank after the other."""
        positions = self.longest_first(k, self.plan.lengths)
        sizes = divisible(self.plan.cut(self.lengths_at(positions, self.plan.lengths)), self.plan.world_size)
        return np.split(positions, np.cumsum(sizes)[:-1])

    def micro_batches(self, k: int, rank: int) -> Sequence[range | Ids]:
        if self.plan.grouped:
            return self.in_turn(k)[rank :: self.plan.world_size]
        lengths = self.plan.lengths
        share = share_of(self.window(k), rank, self.plan.world_size)
        ends = np.cumsum(self.plan.cut(self.lengths_at(share, lengths))).tolist()
        return [share[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


@dataclass(frozen=True, kw_only=True)
class TokenPlan(Plan):
    """A plan like :class:`BatchPlan` whose windows hold as many samples as fit into a budget of tokens.

    A window takes the next samples of the epoch's order while their tokens stay within the budget, and at least one.
    So its samples depend on neither the world size nor the micro-batch size.

    Args:
        lengths: tokens of each sample, shape ``(samples,)``.
        tokens: the most tokens of one optimizer step over all ranks.
        micro_batch_size: the most samples one forward/backward on one rank takes.
        world_size: number of ranks.
        seed: for the order of samples, which differs every epoch; None for the dataset's own order.
        weights: by which an epoch's samples are drawn; None: each comes once.
        names: what an error calls the sizes.

    Raises:
        ConfigError: a size is below 1, or there are no samples.
    """

    lengths: Ids
    tokens: int
    micro_batch_size: int
    world_size: int
    seed: int | None = None
    weights: Weights | None = None
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

    @property
    def position(self) -> dict[str, Any]:
        """The numbers that give a window's index its meaning."""
        total = int(self.lengths.sum())
        samples = {"samples": self.samples, "tokens in all samples": total}
        return {"batch.tokens": self.tokens, **samples, "seed": seed_number(self.seed, self.weights)}

    @cached_property
    def _first_epoch(self) -> Epoch:
        return self.epoch(0)

    def as_dict(self) -> dict[str, Any]:
        """The plan as written to ``plan.json``; windows are those of the first epoch."""
        first = self._first_epoch
        steps = max(len(first.micro_batches(k, 0)) for k in range(first.windows_per_epoch))
        return as_written(self, first, "tokens", self.tokens, steps)

    def describe(self) -> list[str]:
        """The plan in words, one line per fact."""
        plan = self.as_dict()
        update = f"global batch {self.tokens:,} tokens = up to {describe_steps(self, plan['accumulation_steps'])}"
        return [update, f"{self.samples:,} samples in {plan['windows_per_epoch']} steps (the first epoch)"]


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
