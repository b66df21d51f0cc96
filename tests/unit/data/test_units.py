"""Units, the same on any number of ranks, dealt in blocks; the order of their sums is that of a binary counter."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from distaccum.data.plan.batch import BatchPlan, GroupedPlan, Resize, ResizedPlan
from distaccum.data.plan.scheduled import ScheduledPlan, Stage
from distaccum.data.plan.tokens import MicroTokenPlan, TokenPlan
from distaccum.data.plan.units import UnitAssignment, UnitPlan, joined, nodes_within
from distaccum.engines.partial_sums import add_up
from distaccum.errors import ConfigError

WORLDS = (1, 2, 3, 4, 6, 8)
LENGTHS = np.random.default_rng(0).integers(1, 20, 50)
SIZES: dict[str, Any] = {"micro_batch_size": 3, "world_size": 1, "seed": 4}


def padded(lengths: Any) -> int:
    return int(len(lengths) * max(lengths, default=0))


PLANS: dict[str, UnitPlan] = {
    "samples": UnitPlan(plan=BatchPlan(samples=50, global_batch_size=20, **SIZES)),
    "few blocks": UnitPlan(plan=BatchPlan(samples=50, global_batch_size=40, **SIZES), virtual_ranks=8),
    "tokens": UnitPlan(plan=TokenPlan(lengths=LENGTHS, tokens=100, **SIZES)),
    "stages": UnitPlan(plan=ScheduledPlan(samples=50, stages=(Stage(6, 3, "updates"),), global_batch_size=20, **SIZES)),
    "resized": UnitPlan(
        plan=ResizedPlan(
            samples=50, global_batch_size=7, since=Resize(global_batch_size=7, epoch=0, window=1, position=20), **SIZES
        )
    ),
    "grouped": UnitPlan(plan=GroupedPlan(plan=BatchPlan(samples=50, global_batch_size=20, **SIZES), lengths=LENGTHS)),
    "micro tokens": UnitPlan(
        plan=MicroTokenPlan(
            plan=BatchPlan(samples=50, global_batch_size=20, **SIZES),
            lengths=LENGTHS,
            micro_tokens=40,
            tokens_of=padded,
            grouped=True,
        ),
        virtual_ranks=8,
    ),
}


def on(plan: Any, world_size: int) -> Any:
    if isinstance(plan, UnitPlan | MicroTokenPlan | GroupedPlan):
        return replace(plan, plan=on(plan.plan, world_size))
    return replace(plan, world_size=world_size)


@pytest.mark.parametrize("name", PLANS)
def test_a_windows_units_are_the_same_on_any_number_of_ranks(name: str) -> None:
    first = 1 if name == "resized" else 0
    seen = []
    for world in WORLDS:
        plan = on(PLANS[name], world)
        cut, windows = plan.epoch(0), []
        for k in range(first, cut.windows_per_epoch):
            assignment = cut.assignment(k)
            dealt = [cut.micro_batches(k, rank) for rank in range(world)]
            assert [len(units) for units in dealt] == [len(assignment.units_of(rank)) for rank in range(world)]
            units = [[int(i) for i in unit] for of_rank in dealt for unit in of_rank]
            assert sorted(i for unit in units for i in unit) == list(cut.window(k))
            assert all(units)
            windows.append((assignment.blocks, units))
        assert plan.micro_steps >= max(len(cut.micro_batches(k, 0)) for k in range(first, cut.windows_per_epoch))
        assert plan.as_dict()["accumulation_steps"] == plan.micro_steps
        seen.append((windows, plan.position))
    assert all(one == seen[0] for one in seen)


def test_blocks_are_dealt_whole_and_evenly() -> None:
    for units in (1, 2, 5, 24, 25, 100):
        for ranks in (1, 2, 3, 5, 8, 24):
            assignment = UnitAssignment(units, min(units, 24), ranks)
            blocks = [block for rank in range(ranks) for block in assignment.blocks_of(rank)]
            assert blocks == list(range(assignment.blocks))
            assert [i for rank in range(ranks) for i in assignment.units_of(rank)] == list(range(units))
            sizes = [len(assignment.blocks_of(rank)) for rank in range(ranks)]
            assert max(sizes) - min(sizes) <= 1


def test_grouped_units_are_of_like_lengths_and_each_rank_has_long_and_short_ones() -> None:
    lengths = np.random.default_rng(1).integers(1, 100, 400)
    whole = BatchPlan(samples=400, global_batch_size=400, **SIZES)
    cut = MicroTokenPlan(plan=whole, lengths=lengths, micro_tokens=400, tokens_of=padded, grouped=True)
    plan = UnitPlan(plan=cut)
    units = [lengths[plan.ids(0, np.asarray(unit))] for unit in plan.epoch(0).units(0)]
    assert all(padded(unit) <= 400 for unit in units)
    assert np.mean([unit.max() - unit.min() for unit in units]) < 10
    for ranks in (2, 3, 8):
        tokens = []
        for rank in range(ranks):
            own = UnitAssignment(len(units), 24, ranks).units_of(rank)
            tokens.append(sum(unit.sum() for unit in units[own.start : own.stop]))
        assert max(tokens) < 1.3 * np.mean(tokens)


def test_what_a_runs_numbers_depend_on_is_in_its_position() -> None:
    assert PLANS["samples"].position == {
        **PLANS["samples"].plan.position,
        "batch.unit_size": 3,
        "batch.virtual_ranks": 32,
    }
    assert PLANS["micro tokens"].position["batch.micro_tokens"] == 40


def test_more_ranks_than_blocks_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"virtual_ranks=32: is less than the 33 ranks"):
        UnitPlan(plan=BatchPlan(samples=50, global_batch_size=50, micro_batch_size=1, world_size=33))


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
