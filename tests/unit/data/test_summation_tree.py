"""The order of a window's sums: the same whoever has which blocks, and that of a binary counter."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from distaccum.data.plan.units import UnitAssignment, joined, nodes_within
from distaccum.engines.partial_sums import add_up


def counter(leaves: Sequence[Tensor]) -> Tensor:
    """Pairwise summation by a binary counter: like sums of 2**n leaves are added as soon as there are two."""
    digits: list[tuple[int, Tensor]] = []
    for leaf in leaves:
        size, total = 1, leaf
        while digits and digits[-1][0] == size:
            total = digits.pop()[1] + total
            size *= 2
        digits.append((size, total))
    total = digits.pop()[1]
    while digits:
        total = digits.pop()[1] + total
    return total


def by_ranks(leaves: Sequence[Tensor], ranks: int) -> Tensor:
    """As the engines do it: each rank adds while it computes, and the nodes that are left are added up."""
    assignment, values = UnitAssignment(len(leaves), len(leaves), ranks), {}
    for rank in range(ranks):
        own, kept = assignment.blocks_of(rank), list[Tensor]()
        nodes, added = joined(len(leaves), (), own)
        for block, others in zip(own, added, strict=True):
            kept.append(leaves[block].clone())
            for _ in others:
                kept[-2:] = [kept[-2] + kept[-1]]
        values |= dict(zip(nodes, kept, strict=True))
    return add_up(values, len(leaves))


@pytest.mark.parametrize("blocks", [1, 2, 3, 5, 6, 7, 8, 12, 24, 33])
def test_the_sum_is_the_counters_on_any_number_of_ranks(blocks: int) -> None:
    generator = torch.Generator().manual_seed(blocks)
    leaves = [torch.randn(50, generator=generator) * 10.0 ** (i % 5) for i in range(blocks)]
    expected = counter(leaves)
    for ranks in range(1, blocks + 3):
        assert torch.equal(by_ranks(leaves, ranks), expected)
    if blocks > 4:  # else there is no other order
        assert not torch.equal(sum(leaves[1:], leaves[0]), expected)


def test_fewest_nodes_that_cover_a_range() -> None:
    assert nodes_within(8, 0, 8) == [(0, 8)]
    assert nodes_within(8, 2, 5) == [(2, 4), (4, 5)]
    assert nodes_within(7, 4, 7) == [(4, 7)]  # a part of the tree as well
    assert nodes_within(24, 8, 12) == [(8, 12)]
    assert nodes_within(5, 3, 3) == []
    for blocks in range(1, 30):
        for _ in range(20):
            begin, end = sorted(random.choices(range(blocks + 1), k=2))  # noqa: S311
            found = nodes_within(blocks, begin, end)
            assert [i for node in found for i in range(*node)] == list(range(begin, end))
            assert len(found) <= 2 * blocks.bit_length()
            assert joined(blocks, (), range(begin, end))[0] == found


def test_sums_that_are_held_are_joined_with_what_is_computed_in_any_order() -> None:
    chosen = random.Random(3)  # noqa: S311
    for blocks in range(1, 34):
        leaves = [torch.full((1,), 3.0**i, dtype=torch.float64) for i in range(blocks)]
        for _ in range(10):
            begin, end = sorted(chosen.choices(range(blocks + 1), k=2))
            held = nodes_within(blocks, begin, end)
            rest = [block for block in range(blocks) if not begin <= block < end]
            chosen.shuffle(rest)
            values = {node: torch.stack(leaves[node[0] : node[1]]).sum(0) for node in held}
            nodes, added = joined(blocks, held, rest)
            assert nodes == [(0, blocks)]
            for block, others in zip(rest, added, strict=True):
                node, total = (block, block + 1), leaves[block].clone()
                for other in others:
                    total += values.pop(other)
                    node = min(node[0], other[0]), max(node[1], other[1])
                values[node] = total
            assert torch.equal(values[0, blocks], torch.stack(leaves).sum(0))


def test_live_sums_are_as_few_as_a_counter_has() -> None:
    for blocks in range(1, 65):
        live = most = 0
        for others in joined(blocks, (), range(blocks))[1]:
            live += 1
            most = max(most, live)
            live -= len(others)
        assert live == 1
        assert most <= blocks.bit_length()


def test_the_sum_is_as_near_to_that_of_whole_numbers_as_a_trees_depth_says() -> None:
    generator = torch.Generator().manual_seed(5)
    for blocks in (8, 24, 32):
        leaves = [torch.randn(4000, generator=generator) for _ in range(blocks)]
        # A second opinion: fixed point in int64, which any order adds up to the same numbers.
        whole = [(leaf.double() * 2**40).round().long() for leaf in leaves]
        total = sum(whole[1:], whole[0])
        assert torch.equal(sum(reversed(whole[:-1]), whole[-1]), total)
        exact, sizes = total.double() / 2**40, torch.stack(leaves).double().abs().sum(0)
        depth, unit = (blocks - 1).bit_length(), torch.finfo(torch.float32).eps / 2
        error = (by_ranks(leaves, 3).double() - exact).abs()
        assert bool((error <= depth * unit * sizes * 1.01).all())
        one_by_one = (sum(leaves[1:], leaves[0]).double() - exact).abs()
        assert error.square().mean() < one_by_one.square().mean()
