"""A tree's reduction that may fail and be made again: each rank keeps what it sends, and numbers travel along."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from distaccum.data.plan.units import Node, UnitAssignment
from distaccum.distributed.world import World
from distaccum.engines.ddp.tree import TreeReducer


@dataclass(frozen=True, kw_only=True)
class PartialWindow:
    """What a rank has of a window that is not reduced: sums of blocks by node of the tree, and what goes along.

    ``used`` says of each parameter whether they depend on it, where parameters may be unused.
    """

    sums: Mapping[Node, Sequence[Tensor]] = field(default_factory=dict)
    along: Tensor | None = None
    used: Sequence[int] = ()


class KeptTree(TreeReducer):
    """A :class:`TreeReducer` that still has what it has sent when the reduction, which follows the backward, fails.

    Args:
        world: this rank.
        by_units: whether the order is that of units, whose assignment each window has; else each rank has one node.
    """

    def __init__(self, world: World, *, by_units: bool) -> None:
        super().__init__(world)
        self._by_units = by_units
        self.resumed = False
        """Whether the open window began with sums from before."""
        self.taken_up = PartialWindow()
        """Of the window that begins next, from before; what its assignment says of the sums is used."""
        self._along: Tensor | None = None
        self.received = torch.empty(0)
        """The sum over the ranks of what was sent along."""
        self._beside = torch.empty(0)  # a bucket's shards, in its type
        self._owes = False

    def begin(self, assignment: UnitAssignment | None) -> None:
        """See :class:`TreeReducer`."""
        if assignment is None and not self._by_units:
            assignment = UnitAssignment(self._ranks, self._ranks, self._ranks)
        super().begin(assignment)
        held = () if assignment is None else assignment.held_by(self._rank)
        self.resumed, self._along = bool(held), self.taken_up.along if held else None
        for node in held:
            self._partial.keep(node, self.taken_up.sums[node])
        self.taken_up = PartialWindow()

    @property
    def kept(self) -> PartialWindow:
        """The sums of this rank's blocks that have ended, of each bucket one, and what was given to go along."""
        return PartialWindow(sums=dict(self._partial.sums), along=self._along)

    def send_along(self, numbers: Tensor) -> None:
        """Has fp64 ``numbers`` travel with the reduction, beside a bucket's shards: its bits, whatever the type."""
        self._along = numbers if self._along is None else self._along + numbers
        self.received = self._along

    def micro_step_ended(self) -> None:
        """See :class:`TreeReducer`."""
        if self._by_units and (ended := self._clock.micro_step_ended()) is not None:
            self._partial.end_block(*ended)

    def finish(self) -> None:
        """After the last bucket of a reduction that DDP has begun."""
        if self._owes:
            self._owes = False
            self.reduce_kept()

    def reduce_kept(self) -> None:
        """The whole reduction of a window whose backwards are done: of what is kept, which stays.

        The buckets take the sums.
        """
        last = self._clock.last
        if not self._given_up and last is not None:
            self._partial.end_block(*last)
        smallest = min(self._buckets.values(), key=Tensor.numel)
        for number, whole in self._buckets.items():
            self._beside = whole.new_empty(0)
            if self._along is not None and whole is smallest:
                self._beside = self._along.to(whole.device).flatten().view(whole.dtype)
            super()._ready(number, whole)
        super().finish()

    def _ready(self, number: int, whole: Tensor) -> None:
        self._owes = True

    def _own(self, number: int, whole: Tensor) -> list[Tensor]:
        nodes = self._clock.nodes_of(self._rank)
        if self._given_up or not nodes:
            return super()._own(number, whole)
        return [self._partial.sums[node][number] for node in nodes]

    def _exchange(
        self, content: Tensor, cuts: Sequence[int], arriving: Sequence[int], *, first: bool
    ) -> tuple[Any, Tensor]:
        """Every rank sends in the first round, and what goes along with that."""
        beside = self._beside.numel() if first else 0
        if beside:
            content = torch.cat([each for shard in content.split_with_sizes(cuts) for each in (shard, self._beside)])
            cuts, arriving = [cut + beside for cut in cuts], [size + beside for size in arriving]
        return super()._exchange(content, cuts, arriving, first=first)

    def _apart(self, received: Tensor, own: int) -> Sequence[Tensor]:
        if received.shape[1] > own:
            assert self._along is not None
            self.received = received[:, own:].contiguous().view(torch.float64).sum(0).view(self._along.shape)
        return received[:, :own].unbind()
