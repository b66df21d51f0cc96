"""The sums of a window's blocks on one rank, added in the order of the summation tree while the window is computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from distaccum.data.plan.summation_tree import Node, halves, nodes_within, sums_after
from distaccum.data.plan.units import Deal
from distaccum.errors import MisuseError


class BlockClock:
    """Tells at which micro-steps of a rank its blocks end, and what is added then.

    Args:
        rank: this one's number.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.deal: Deal | None = None
        self._done = self._block = 0
        self._sums: Sequence[int] = ()
        self._ends: Sequence[int] = ()

    def begin(self, deal: Deal | None) -> None:
        """A window begins; without a ``deal`` it may not be reduced."""
        self.deal, self._done, self._block = deal, 0, 0
        self._sums = self._ends = ()
        if deal is None:
            return
        own = deal.blocks_of(self._rank)
        self._sums = sums_after(deal.blocks, own.start, own.stop)
        first = deal.units_of(self._rank).start
        self._ends = [deal.units_of_block(block).stop - first for block in own]

    def expect_deal(self) -> Deal:
        """How the window's units are dealt.

        Raises:
            MisuseError: nobody said so.
        """
        if self.deal is None:
            problem = "numerics=reproducible sums a window's units in a fixed order, and nobody says which these are"
            remedy = "take windows from acc.windows() of a dataset, or give engine.begin_window() their deal"
            raise MisuseError(f"{problem}: {remedy}")
        return self.deal

    def nodes_of(self, rank: int) -> Sequence[Node]:
        """What ``rank`` gives to the reduction."""
        deal = self.expect_deal()
        own = deal.blocks_of(rank)
        return nodes_within(deal.blocks, own.start, own.stop)

    @property
    def last_sums(self) -> int:
        """How often the last two sums are added after this rank's last block."""
        return self._sums[-1] if self._sums else 0

    def micro_step_ended(self) -> int | None:
        """Counts one that is not the window's last: how often sums are added after it; None: in the midst of a block.

        Raises:
            MisuseError: the window has no more on this rank.
        """
        if self.deal is None:
            return None
        self._done += 1
        if self._block >= len(self._ends) or self._done >= self._ends[-1]:
            units = len(self.deal.units_of(self._rank))
            problem = f"micro-step {self._done} of a window that has {units} units on this rank"
            raise MisuseError(f"{problem}: run each unit once, and the last one with sync=True")
        if self._done < self._ends[self._block]:
            return None
        self._block += 1
        return self._sums[self._block - 1]


class PartialSums:
    """The sums of the blocks that have ended, in the order of blocks: those whose neighbour is still to come.

    Args:
        accumulated: gives the tensors in which a window accumulates; the same ones in every window.
    """

    def __init__(self, accumulated: Callable[[], list[Tensor]]) -> None:
        self._accumulated = accumulated
        self.sums: list[list[Tensor]] = []
        self._free: list[list[Tensor]] = []

    def end_block(self, sums: int) -> None:
        """Adds as many of the last sums as the tree says, keeps the result, and zeroes what accumulates."""
        tensors = self._accumulated()
        for _ in range(sums):
            last = self.sums.pop()
            torch._foreach_add_(tensors, last)
            self._free.append(last)
        kept = self._free.pop() if self._free else [torch.empty_like(tensor) for tensor in tensors]
        torch._foreach_copy_(kept, tensors)
        torch._foreach_zero_(tensors)
        self.sums.append(kept)

    def drop(self) -> None:
        """Forgets the window's sums; their memory is used again."""
        self._free += self.sums
        self.sums = []


def add_up(values: Mapping[Node, Tensor], blocks: int) -> Tensor:
    """The sum at the root, given nodes that cover all ``blocks``; in place, in the first of them."""
    return _value(values, (0, blocks))


def _value(values: Mapping[Node, Tensor], node: Node) -> Tensor:
    if node in values:
        return values[node]
    left, right = halves(node)
    return _value(values, left).add_(_value(values, right))
