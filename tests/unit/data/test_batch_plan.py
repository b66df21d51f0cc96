from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distaccum.data.plan.batch import BatchPlan
from distaccum.errors import ConfigError

plans = st.builds(
    lambda samples, micro, more, world: BatchPlan(
        samples=samples, global_batch_size=micro + more, micro_batch_size=micro, world_size=world
    ),
    st.integers(1, 300),
    st.integers(1, 40),
    st.integers(0, 60),
    st.integers(1, 9),
)


@given(plans)
def test_an_epoch_is_every_position_once_in_order(plan: BatchPlan) -> None:
    positions = [
        position
        for k in range(plan.windows_per_epoch)
        for rank in range(plan.world_size)
        for micro in plan.micro_batches(k, rank)
        for position in micro
    ]
    assert positions == list(range(plan.samples))


@given(plans)
def test_windows_do_not_depend_on_the_world(plan: BatchPlan) -> None:
    alone = BatchPlan(samples=plan.samples, global_batch_size=plan.global_batch_size, micro_batch_size=1, world_size=1)
    assert [plan.window(k) for k in range(plan.windows_per_epoch)] == [
        alone.window(k) for k in range(alone.windows_per_epoch)
    ]


@given(plans)
def test_ranks_take_equal_numbers_of_micro_steps_none_above_the_micro_size(plan: BatchPlan) -> None:
    for k in range(plan.windows_per_epoch):
        sliced = [plan.micro_batches(k, rank) for rank in range(plan.world_size)]
        assert {len(micros) for micros in sliced} == {plan.micro_steps(k)}
        assert max(len(micro) for micros in sliced for micro in micros) <= plan.micro_batch_size
        shares = [sum(map(len, micros)) for micros in sliced]
        assert max(shares) - min(shares) <= 1
        assert plan.micro_steps(k) == -(
            -max(shares) // plan.micro_batch_size
        )  # no more steps than the largest share needs


def test_the_plan_that_is_written_down() -> None:
    plan = BatchPlan(samples=130, global_batch_size=50, micro_batch_size=6, world_size=4)
    assert plan.as_dict() == {
        "unit": "samples",
        "samples": 130,
        "global_size": 50,
        "micro_size": 6,
        "world_size": 4,
        "accumulation_steps": 3,
        "windows_per_epoch": 3,
        "last_window_size": 30,
    }


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"global_batch_size": 0}, "global_batch_size"),
        ({"micro_batch_size": -1}, "micro_batch_size"),
        ({"micro_batch_size": 9}, "micro_batch_size"),
        ({"samples": 0}, "data"),
    ],
)
def test_impossible_plans_name_the_key(changes: dict[str, int], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        BatchPlan(**({"samples": 10, "global_batch_size": 8, "micro_batch_size": 2, "world_size": 1} | changes))
    assert caught.value.key == key


def test_no_window_outside_the_epoch() -> None:
    plan = BatchPlan(samples=10, global_batch_size=8, micro_batch_size=2, world_size=1)
    with pytest.raises(IndexError, match="window 2 of an epoch of 2"):
        plan.window(2)
