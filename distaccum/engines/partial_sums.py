"""The sums of a window's blocks on one rank, added in the order of the summation tree while the window is computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from distaccum.data.plan.units import Node, UnitAssignment, halves, joined
from distaccum.errors import MisuseError


class BlockClock:
    """Tells at which micro-steps of a rank its blocks end, and what is added then.

    Args:
        rank: this one's number.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.assignment: UnitAssignment | None = None
        self._done = self._block = 0
        self._blocks: Sequence[int] = ()
        self._added: Sequence[Sequence[Node]] = ()
        self._ends: Sequence[int] = ()

    def begin(self, assignment: UnitAssignment | None) -> None:
        """A window begins; without an ``assignment`` it may not be reduced."""
        self.assignment, self._done, self._block = assignment, 0, 0
        self._blocks = self._added = self._ends = ()
        if assignment is None:
            return
        self._blocks = assignment.blocks_of(self._rank)
        _, self._added = joined(assignment.blocks, assignment.held_by(self._rank), self._blocks)
        self._ends = [*accumulate(len(assignment.units_of_block(block)) for block in self._blocks)]

    def expect_assignment(self) -> UnitAssignment:
        """How the window's units are dealt.

        Raises:
            MisuseError: nobody said so.
        """
        if self.assignment is None:
            problem = "numerics=reproducible sums a window's units in a fixed order, and nobody says which these are"
            remedy = "take windows from acc.windows() of a dataset, or give engine.begin_window() their assignment"
            raise MisuseError(f"{problem}: {remedy}")
        return self.assignment

    def nodes_of(self, rank: int) -> Sequence[Node]:
        """What ``rank`` gives to the reduction."""
        return self.expect_assignment().nodes_of(rank)

    @property
    def last(self) -> tuple[int, Sequence[Node]] | None:
        """This rank's last block, and the sums that are added to it; None where it computes none."""
        return (self._blocks[-1], self._added[-1]) if self._blocks else None

    def micro_step_ended(self) -> tuple[int, Sequence[Node]] | None:
        """Counts one that is not the window's last: the block that it ends, and the sums that are added to that.

        Returns:
            None in the midst of a block.

        Raises:
            MisuseError: the window has no more on this rank.
        """
        if self.assignment is None:
            return None
        self._done += 1
        if self._block >= len(self._ends) or self._done >= self._ends[-1]:
            units = len(self.assignment.units_of(self._rank))
            problem = f"micro-step {self._done} of a window that has {units} units on this rank"
            raise MisuseError(f"{problem}: run each unit once, and the last one with sync=True")
        if self._done < self._ends[self._block]:
            return None
        self._block += 1
        return self._blocks[self._block - 1], self._added[self._block - 1]


class PartialSums:
    """The sums of the blocks that have ended, by the node of the tree: those whose other half is still to come.

    Args:
        accumulated: gives the tensors in which a window accumulates; the same ones in every window.
    """

    def __init__(self, accumulated: Callable[[], list[Tensor]]) -> None:
        self._accumulated = accumulated
        self.sums: dict[Node, list[Tensor]] = {}
        self._free: list[list[Tensor]] = []

    def end_block(self, block: int, others: Sequence[Node]) -> None:
        """Adds ``others`` to the block that has ended, keeps the result, and zeroes what accumulates."""
        tensors, node = self._accumulated(), (block, block + 1)
        for other in others:
            kept = self.sums.pop(other)
            torch._foreach_add_(tensors, kept)
            self._free.append(kept)
            node = min(node[0], other[0]), max(node[1], other[1])
        self.keep(node, tensors)
        torch._foreach_zero_(tensors)

    def keep(self, node: Node, tensors: Sequence[Tensor]) -> None:
        """Keeps a copy of a sum."""
        kept = self._free.pop() if self._free else [torch.empty_like(tensor) for tensor in tensors]
        torch._foreach_copy_(kept, list(tensors))
        self.sums[node] = kept

    def drop(self) -> None:
        """Forgets the window's sums; their memory is used again."""
        self._free += self.sums.values()
        self.sums = {}


def add_up(values: Mapping[Node, Tensor], blocks: int) -> Tensor:
    """The sum at the root, given nodes that cover all ``blocks``; in place, in the first of them."""
    return _value(values, (0, blocks))


def _value(values: Mapping[Node, Tensor], node: Node) -> Tensor:
    if node in values:
        return values[node]
    left, right = halves(node)
    return _value(values, left).add_(_value(values, right))
