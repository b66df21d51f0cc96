"""Units: micro-batches that are the same on any number of ranks, dealt in blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from distaccum.data.plan.batch import BatchPlan, GroupedPlan, Resize, ResizedPlan
from distaccum.data.plan.scheduled import ScheduledPlan, Stage
from distaccum.data.plan.tokens import MicroTokenPlan, TokenPlan
from distaccum.data.plan.units import UnitAssignment, UnitPlan
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
            samples=50,
            global_batch_size=7,
            since=Resize(global_batch_size=7, epoch=0, window=1, position=20),
            **SIZES,
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
    """The same plan on another number of ranks."""
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
