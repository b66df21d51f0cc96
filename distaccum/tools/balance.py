"""Deals micro-batches to ranks so that the longest rank has little more to compute than the others.

Source of the rule, longest processing time first: R. L. Graham, "Bounds on multiprocessing timing anomalies" (1969);
with a most number of jobs a machine: M. Dell'Amico and S. Martello, "Bounds for the cardinality constrained P||Cmax
problem" (2001).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import nn
from torch.utils.data import default_collate

from distaccum.config.checks import REPRODUCIBLE, require
from distaccum.data.factory import lengths_of
from distaccum.data.loader import tokens_of
from distaccum.data.packing import PackCollator
from distaccum.data.plan.batch import CutEpoch, CutPlan, Ids, Plan, spread
from distaccum.data.spec import DataSpec, MapDataset
from distaccum.distributed.random import RNGState
from distaccum.errors import ConfigError, MisuseError
from distaccum.losses.base import AnyLoss
from distaccum.tools.flops import ModelFlops
from distaccum.train.parts.base import Done, Part

if TYPE_CHECKING:
    from distaccum.config.schema import RunConfig
    from distaccum.data.plan.stream import StreamPlan
    from distaccum.train.loop import Loop

_KEY, _LEAVE = "batch.balance", "Leave it out"
_WINDOWS_TOLD = 20


def balance(costs: Iterable[float], parts: int, *, equal: bool = True) -> list[list[int]]:
    """Which of the items go to which of ``parts``, so that the parts' sums are about the same.

    The costliest item is dealt first, each to the part with the smallest sum so far. The same costs give the same parts
    everywhere. Of micro-batches for ranks, in a loop whose ranks know all of them::

        mine = [micro_batches[i] for i in distaccum.balance(tokens, world.size)[world.rank]]

    Args:
        costs: of each item: its tokens, or its operations; not below 0.
        parts: ranks, or micro-batches where items are samples.
        equal: whether no part has more items than the largest of equal parts would; otherwise it may have any number.

    Returns:
        The items of each part by their numbers, the costliest first.

    Raises:
        MisuseError: there are no parts, or a cost is negative or no finite number.
    """
    values = np.asarray(costs if isinstance(costs, np.ndarray) else list(costs), dtype=np.float64)
    if parts < 1:
        raise MisuseError(f"balance() over {parts} parts: give at least 1")
    if values.ndim != 1 or not (np.isfinite(values).all() and values.min(initial=0.0) >= 0):
        raise MisuseError("balance() of costs that are not finite numbers from 0 on, one for each item")
    most = -(-len(values) // parts) if equal else len(values)
    found: list[list[int]] = [[] for _ in range(parts)]
    open_parts = [(0.0, 0, part) for part in range(parts)]  # a heap: sum, items, and which
    for item in np.argsort(-values, kind="stable").tolist():
        total, items, part = open_parts[0]
        found[part].append(item)
        if items + 1 < most:
            heapq.heapreplace(open_parts, (total + float(values[item]), items + 1, part))
        else:
            heapq.heappop(open_parts)
    return found


Cost = Callable[[Ids], float]
"""From the lengths of a micro-batch's samples to what it costs."""


@dataclass(frozen=True, kw_only=True)
class BalancedPlan(CutPlan):
    """The windows of another plan, whose micro-batches are dealt to the ranks by what they cost.

    A micro-batch holds the samples that the other plan gives it, and no rank has more of them than an equal division
    gives. So a window's samples and its position are the other plan's: a checkpoint goes on with any balance.

    Args:
        plan: of the windows and their micro-batches.
        lengths: tokens of each sample, shape ``(samples,)``.
        cost: of a micro-batch.
        by: what is balanced, ``tokens`` or ``flops``.
        facts: what has to be the same on all ranks, beside the lengths.
    """

    plan: Plan
    lengths: Ids
    cost: Cost
    by: str
    facts: Mapping[str, Any] = field(default_factory=dict)

    def epoch(self, epoch: int) -> BalancedEpoch:
        """The epoch's windows."""
        return BalancedEpoch(plan=self, epoch=epoch, windows=self.plan.epoch(epoch))

    @property
    def largest(self) -> int:
        """See :class:`Plan`."""
        return self.plan.largest

    @property
    def limit_of_tokens(self) -> dict[str, int]:
        """See :class:`Plan`."""
        return self.plan.limit_of_tokens

    @property
    def micro_batch_in_words(self) -> str:
        """See :class:`Plan`."""
        return self.plan.micro_batch_in_words

    def as_dict(self) -> dict[str, Any]:
        """The plan as written to ``plan.json``: a rank has no more micro-steps than in the other plan."""
        return self.plan.as_dict() | {"balance": self.by}

    def describe(self) -> list[str]:
        """The plan in words; of some windows of the first epoch, what the balance is worth."""
        update, *others = self.plan.describe()
        return [f"{update}, balanced by {self.by}: {in_words(*self.over_means())}", *others]

    def over_means(self) -> tuple[float, float]:
        """The longest rank over the mean, in some windows of the first epoch: balanced, and without it."""
        cut = self.epoch(self.first_whole_epoch)
        windows = spread(cut.windows_per_epoch)
        some = windows[:: -(-len(windows) // _WINDOWS_TOLD)]
        now, before = (float(np.mean([over_mean(cut.costs(k, dealt=dealt)) for k in some])) for dealt in (True, False))
        return now, before


@dataclass(frozen=True, kw_only=True)
class BalancedEpoch(CutEpoch):
    """An epoch of a plan's ``windows``, whose micro-batches are dealt by their costs."""

    plan: BalancedPlan
    _last: dict[int, list[list[range | Ids]]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def micro_batches(self, k: int, rank: int) -> Sequence[range | Ids]:
        """The micro-batches of ``rank`` in window ``k``, the costliest first."""
        if k not in self._last:  # a loader asks for a window several times
            dealt = self._dealt(k)
            self._last.clear()
            self._last[k] = dealt
        return self._last[k][rank]

    def _dealt(self, k: int) -> list[list[range | Ids]]:
        """By the rule; or as the other plan has them, where the rule, which is no optimum, gives the longest more."""
        given = self._of_ranks(k)
        found, ends = [part for own in given for part in own], np.cumsum([len(own) for own in given])
        cost = self._cost_of(found)
        as_given = [list(range(end - len(own), end)) for own, end in zip(given, ends.tolist(), strict=True)]
        deals = balance(cost, self.plan.world_size), as_given
        best = min(deals, key=lambda deal: max(sum(cost[i] for i in own) for own in deal))
        return [[found[i] for i in own] for own in best]

    def _of_ranks(self, k: int) -> list[Sequence[range | Ids]]:
        """The other plan's micro-batches of window ``k``, by rank."""
        ranks = self.plan.world_size
        if getattr(self.plan.plan, "grouped", False):
            in_turn = cast(Any, self.windows).in_turn(k)
            found = [in_turn[rank::ranks] for rank in range(ranks)]
        else:
            found = [self.windows.micro_batches(k, rank) for rank in range(ranks)]
        return [[part for part in own if len(part)] for own in found]

    def _cost_of(self, micro_batches: Sequence[range | Ids]) -> list[float]:
        """An order that is computed position by position costs nearly as much for one as for all."""
        if not micro_batches:
            return []
        lengths = self.lengths_at(np.concatenate(micro_batches), self.plan.lengths)
        ends = np.cumsum([len(part) for part in micro_batches])[:-1]
        return [float(self.plan.cost(own)) for own in np.split(lengths, ends)]

    def costs(self, k: int, *, dealt: bool = True) -> list[float]:
        """What each rank's part of window ``k`` costs, as it is dealt or as the other plan has it."""
        ranks = self._dealt(k) if dealt else self._of_ranks(k)
        cost = iter(self._cost_of([part for own in ranks for part in own]))
        return [sum(islice(cost, len(own))) for own in ranks]


def over_mean(costs: Sequence[float]) -> float:
    """The longest rank's cost over the mean; 1 where there is nothing to compute."""
    return max(costs) * len(costs) / total if (total := sum(costs)) else 1.0


def in_words(now: float, before: float) -> str:
    """What a balance is worth."""
    return f"the longest rank has {now:.3g} times the mean, and {before:.3g} times without the balance"


def balanced(
    plan: Plan | StreamPlan, data: DataSpec, model: nn.Module, loss: AnyLoss, config: RunConfig
) -> BalancedPlan:
    """The plan of a run that balances what its ranks compute.

    Raises:
        ConfigError: the data is a stream or does not say how long its samples are, the sums have a fixed order, or the
            model's operations cannot be counted.
    """
    by = config.batch.balance
    if plan.is_stream:
        raise ConfigError(_KEY, by, "the data is a stream, of which each rank has its own samples", _LEAVE)
    problem = "and numerics=reproducible deals units in blocks, whose sums have a fixed order"
    require(config.numerics != REPRODUCIBLE, _KEY, by, problem, f"{_LEAVE}, or use numerics=fast")
    lengths, padded = lengths_of(data, _KEY, by), tokens_of(data.collate)
    if by == "tokens":
        return BalancedPlan(plan=plan, lengths=lengths, cost=padded, by=by, facts={_KEY: by})
    square = _of_squares(data, lengths, model, loss)
    packs = isinstance(data.collate, PackCollator)

    def flops(own: Ids) -> float:
        tokens = padded(own)
        squares = float(np.square(own, dtype=np.float64).sum()) if packs else tokens**2 / len(own)
        return tokens + square * squares

    return BalancedPlan(plan=plan, lengths=lengths, cost=flops, by=by, facts={_KEY: f"{by}, squares by {square:.6g}"})


def _of_squares(data: DataSpec, lengths: Ids, model: nn.Module, loss: AnyLoss) -> float:
    """The operations of a sample of L tokens are in proportion to ``L + c L^2``: c, by its shortest and its longest."""
    ends = [int(lengths.argmin()), int(lengths.argmax())]
    short, long = (tokens_of(data.collate)(lengths[[sample]]) for sample in ends)
    collate, samples = data.collate or default_collate, cast(MapDataset, data.train)
    generators, problem = RNGState.capture(), "the model's operations cannot be counted"
    try:
        meter = ModelFlops(model, loss, torch.device("cpu"))
        few, many = (meter.of_batch(collate([samples[sample]])) for sample in ends)
    except Exception as error:  # whatever a model raises that has to read values
        raise ConfigError(
            _KEY, "flops", f"{problem} ({type(error).__name__}: {error})", f"Use {_KEY}=tokens"
        ) from error
    finally:
        generators.restore()
    if few is None or many is None:
        raise ConfigError(_KEY, "flops", problem, f"Use {_KEY}=tokens")
    if short == long:
        return 0.0
    # a S + b S^2 = few, a L + b L^2 = many
    squares = (many / long - few / short) / (long - short)
    each = few / short - squares * short
    return float(f"{max(0.0, squares / each):.6g}") if each > 0 else 1.0


class LongestRank(Part):
    """Tells in a window's record how much more the longest rank computes than the mean of the ranks, by the plan.

    Every rank knows what all of them compute: nothing is communicated, and nobody waits.

    Args:
        plan: of the run.
    """

    def __init__(self, plan: BalancedPlan) -> None:
        self._plan = plan
        self._epoch: tuple[int, BalancedEpoch | None] = (-1, None)

    def adds(self, run: Loop, done: Done | None) -> Mapping[str, Any]:
        """``longest_over_mean``; 1 is the best."""
        if done is None:
            return {}
        epoch, k = done.window.epoch, done.progress.epoch_window - 1
        if self._epoch[0] != epoch:  # O(samples) where windows are cut by tokens
            self._epoch = epoch, self._plan.epoch(epoch)
        cut = self._epoch[1]
        return {} if cut is None or k < 0 else {"longest_over_mean": over_mean(cut.costs(k))}
