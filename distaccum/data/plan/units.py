"""Divides windows into units that are the same on any number of ranks: pure arithmetic, no torch, no state.

A unit is a micro-batch whose samples, order and padding the plan alone decides. A window's units lie in at most
``virtual_ranks`` blocks, and blocks are dealt to ranks whole: what a block adds up does not depend on whose it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, ClassVar

from distaccum.data.plan.batch import CutEpoch, CutPlan, Ids, Plan, spread
from distaccum.errors import ConfigError

# A binary tree over the blocks of a window: in which order their gradients are added, whoever has computed them.
#
# Pure arithmetic, no torch, no state.
#
# A node covers the blocks from its begin to before its end. It is the sum of two nodes, of which the left one covers
# the largest power of two below its number of blocks; so on any number of ranks the same numbers are added in the same
# order. Source of the form: the binary counter of pairwise summation, N. J. Higham, "The Accuracy of Floating Point
# Summation" (1993), section 2.

Node = tuple[int, int]


@lru_cache(maxsize=4096)
def nodes_within(blocks: int, begin: int, end: int) -> Sequence[Node]:
    """The fewest nodes of the tree over ``blocks`` that cover those from ``begin`` to before ``end``, in order."""
    return list(_within((0, blocks), begin, end)) if end > begin else []


def _within(node: Node, begin: int, end: int) -> Iterator[Node]:
    if begin <= node[0] and node[1] <= end:
        yield node
    elif node[0] < end and begin < node[1]:
        for half in halves(node):
            yield from _within(half, begin, end)


@lru_cache(maxsize=4096)
def _above(blocks: int) -> dict[Node, tuple[Node, Node]]:
    """The other half of each node but the root, and the node that both make."""
    found = dict[Node, tuple[Node, Node]]()
    for node in _inner((0, blocks)):
        left, right = halves(node)
        found[left], found[right] = (right, node), (left, node)
    return found


def joined(
    blocks: int, held: Sequence[Node], computed: Sequence[int]
) -> tuple[Sequence[Node], Sequence[Sequence[Node]]]:
    """What is left of sums that are ``held`` and of blocks that are ``computed`` one after the other.

    Two halves of a node are added as soon as both are there.

    Returns:
        The nodes that are left, in order, which for neighbouring blocks are those of :func:`nodes_within`; and for each
        computed block the sums that are added to it, one after the other.
    """
    above, there, added = _above(blocks), set(held), list[Sequence[Node]]()
    for block in computed:
        node, halves_of_it = (block, block + 1), list[Node]()
        while node in above and above[node][0] in there:
            other, node = above[node]
            there.remove(other)
            halves_of_it.append(other)
        there.add(node)
        added.append(halves_of_it)
    return sorted(there), added


def _inner(node: Node) -> Iterator[Node]:
    """The node and those below it that are sums."""
    if node[1] - node[0] > 1:
        for half in halves(node):
            yield from _inner(half)
        yield node


def halves(node: Node) -> tuple[Node, Node]:
    """The two nodes that a node of several blocks is the sum of."""
    begin, end = node
    middle = begin + (1 << ((end - begin - 1).bit_length() - 1))
    return (begin, middle), (middle, end)


VIRTUAL_RANKS = 32  # of 1, 2, 4, 8, 16 or 32 ranks each has one node of the tree, and all have as many blocks


@dataclass(frozen=True, slots=True)
class UnitAssignment:
    """Which units of a window are in which block, and which blocks are which rank's."""

    units: int
    blocks: int
    ranks: int
    begun_by_others: ClassVar[bool] = False
    """Whether a part of the window was computed by ranks that are lost."""

    def blocks_of(self, rank: int) -> Sequence[int]:
        """The blocks that ``rank`` computes, in order; their numbers differ by one at most."""
        return range(self.blocks * rank // self.ranks, self.blocks * (rank + 1) // self.ranks)

    def held_by(self, rank: int) -> Sequence[Node]:
        """The sums that ``rank`` has from before the assignment: none."""
        return ()

    def nodes_of(self, rank: int) -> Sequence[Node]:
        """What ``rank`` gives to the reduction."""
        return joined(self.blocks, self.held_by(rank), self.blocks_of(rank))[0]

    def units_of_block(self, block: int) -> range:
        """The units of a block; their numbers differ by one at most."""
        return range(self.units * block // self.blocks, self.units * (block + 1) // self.blocks)

    def units_of(self, rank: int) -> Sequence[int]:
        """The units that ``rank`` computes, none where it has no block."""
        blocks = self.blocks_of(rank)
        if not blocks:
            return range(0)
        return range(self.units_of_block(blocks[0]).start, self.units_of_block(blocks[-1]).stop)


@dataclass(frozen=True, kw_only=True)
class UnitPlan(CutPlan):
    """The windows of another plan, whose micro-batches are units.

    Args:
        plan: of the windows; its micro-batches on one rank are the units.
        virtual_ranks: the most blocks of a window, and so the most ranks.
        key: what an error calls ``virtual_ranks``.

    Raises:
        ConfigError: there are more ranks than ``virtual_ranks``.
    """

    plan: Plan
    virtual_ranks: int = VIRTUAL_RANKS
    key: str = "virtual_ranks"
    has_units: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.plan.world_size > self.virtual_ranks:
            problem = f"is less than the {self.plan.world_size} ranks, of which some would have nothing to compute"
            remedy = "Give at least as many: it is a part of what a run's numbers depend on"
            raise ConfigError(self.key, self.virtual_ranks, problem, remedy)

    @property
    def lengths(self) -> Ids | None:
        """Tokens of each sample, where they decide about the units or the windows."""
        return getattr(self.plan, "lengths", None)

    @property
    def grouped(self) -> bool:
        """Whether a unit holds samples of similar length."""
        return getattr(self.plan, "grouped", False)

    @property
    def position(self) -> dict[str, Any]:
        """The numbers that give a window's index its meaning, and those that its sums depend on."""
        cut: dict[str, Any] = self.plan.micro_batch_key
        if self.grouped:
            cut = cut | {"batch.group_by_length": True}
        return self.plan.position | cut | {"batch.virtual_ranks": self.virtual_ranks}

    def epoch(self, epoch: int) -> UnitEpoch:
        """The epoch's windows."""
        return UnitEpoch(plan=self, epoch=epoch, windows=self.of_one_rank.epoch(epoch))

    @cached_property
    def of_one_rank(self) -> Plan:
        """The plan of windows as one rank alone would have it: its micro-batches are the units."""
        return self.plan.for_ranks(1)

    @property
    def rows(self) -> int:
        """See :class:`Plan`."""
        return self.of_one_rank.rows

    def assignment(self, units: int) -> UnitAssignment:
        """How that many units of a window are dealt."""
        return UnitAssignment(units, min(units, self.virtual_ranks), self.world_size)

    @cached_property
    def micro_steps(self) -> int:
        """The most units of a rank among windows of the first epoch, 100 at most, spread over it."""
        cut = self.epoch(self.first_whole_epoch)
        deals = [cut.assignment(k) for k in spread(cut.windows_per_epoch)]
        deals.append(self.assignment(-(-self.plan.largest // self.micro_batch_size)))  # of stages that come later
        return max(len(assignment.units_of(rank)) for assignment in deals for rank in range(self.world_size))

    def as_dict(self) -> dict[str, Any]:
        """The plan as written to ``plan.json``: its micro-steps are :attr:`micro_steps`."""
        own = {"accumulation_steps": self.micro_steps, "virtual_ranks": self.virtual_ranks}
        return self.plan.as_dict() | {"unit_size": self.micro_batch_size} | own

    def describe(self) -> list[str]:
        """The plan in words, one line per fact."""
        steps = "1 unit" if self.micro_steps == 1 else f"up to {self.micro_steps} units"
        most = f"{steps} of at most {self.plan.micro_batch_in_words}"
        return self.cut_into(f"{most}, summed in a fixed order in at most {self.virtual_ranks} blocks")


@dataclass(frozen=True, kw_only=True)
class UnitEpoch(CutEpoch):
    """An epoch of a plan's ``windows``, cut into units."""

    plan: UnitPlan

    def units(self, k: int) -> list[range | Ids]:
        """The units of window ``k``, by positions, in the order in which they are dealt."""
        found = [unit for unit in self.windows.micro_batches(k, 0) if len(unit)]
        if not self.plan.grouped:
            return found
        bits = len(found).bit_length()  # neighbours in the order of their bits reversed are of all lengths
        return [found[i] for i in sorted(range(len(found)), key=lambda i: f"{i:0{bits}b}"[::-1])]

    def assignment(self, k: int) -> UnitAssignment:
        """Who computes the units of window ``k``."""
        return self.dealt(k, sum(len(unit) > 0 for unit in self.windows.micro_batches(k, 0)))

    def dealt(self, k: int, units: int) -> UnitAssignment:
        """Who computes window ``k``, which has so many units."""
        return self.plan.assignment(units)

    def counts(self, k: int, counted: Mapping[str, float]) -> Mapping[str, float]:
        """What window ``k`` counts, whose units on all ranks count ``counted``."""
        return counted

    def micro_batches(self, k: int, rank: int) -> Sequence[range | Ids]:
        """The units of ``rank`` in window ``k``."""
        units = self.units(k)
        return [units[unit] for unit in self.dealt(k, len(units)).units_of(rank)]
