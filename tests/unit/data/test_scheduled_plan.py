"""A global batch that follows a schedule: every window as a loop over the samples would make it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distaccum.data.cursor import position_mismatch
from distaccum.data.factory import make_plan
from distaccum.data.loader import padding_share
from distaccum.data.plan.batch import CONFIG_KEYS, BatchPlan
from distaccum.data.plan.scheduled import ScheduledPlan, Stage
from distaccum.data.spec import DataSpec
from distaccum.errors import ConfigError

EPOCHS = 6
STAGES = st.lists(
    st.builds(Stage, st.integers(1, 12), st.integers(1, 60), st.sampled_from(["updates", "samples", "tokens"])),
    min_size=1,
    max_size=4,
)


def _plan(**settings: Any) -> ScheduledPlan:
    sizes = {"samples": 22, "stages": (Stage(3, 2, "updates"), Stage(5, 11, "samples")), "global_batch_size": 8}
    return ScheduledPlan(**({**sizes, "micro_batch_size": 2, "world_size": 2, **settings}))


def _one_by_one(plan: ScheduledPlan, lengths: list[int]) -> list[list[range]]:
    """The windows of each epoch, taken sample by sample."""
    stages, done, epochs = list(plan.stages), 0, list[list[range]]()
    for epoch in range(EPOCHS):
        order, begin, windows = plan.ids(epoch, np.arange(plan.samples)).tolist(), 0, list[range]()
        while begin < plan.samples:
            size = stages[0].global_batch_size if stages else plan.global_batch_size
            window = range(begin, min(begin + size, plan.samples))
            if stages:
                tokens = sum(lengths[order[i]] for i in window)
                done += {"updates": 1, "samples": len(window), "tokens": tokens}[stages[0].unit]
                if done >= stages[0].lasts:
                    del stages[0]
                    done = 0
            windows.append(window)
            begin = window.stop
        epochs.append(windows)
    return epochs


@given(
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=40),
    alike=st.booleans(),
    stages=STAGES,
    size=st.integers(1, 12),
    world=st.integers(1, 5),
    seed=st.none() | st.integers(0, 9),
)
def test_windows_are_those_of_a_loop_over_the_samples(
    *, lengths: list[int], alike: bool, stages: list[Stage], size: int, world: int, seed: int | None
) -> None:
    if alike:
        lengths = [3] * len(lengths)
    plan = ScheduledPlan(
        samples=len(lengths),
        stages=tuple(stages),
        global_batch_size=size,
        micro_batch_size=1,
        world_size=world,
        lengths=3 if alike else np.array(lengths),
        seed=seed,
    )
    expected = _one_by_one(plan, lengths)
    for epoch in (EPOCHS - 1, *range(EPOCHS)):  # asked for in any order
        cut = plan.epoch(epoch)
        assert [cut.window(k) for k in range(cut.windows_per_epoch)] == expected[epoch]
        for k, window in enumerate(expected[epoch]):
            assert sorted(i for rank in range(world) for part in cut.micro_batches(k, rank) for i in part) == [*window]
            steps = max(len(cut.micro_batches(k, rank)) for rank in range(world))
            assert steps <= plan.as_dict()["accumulation_steps"]
        with pytest.raises(IndexError):
            cut.window(cut.windows_per_epoch)
    assert plan.updates(EPOCHS) == sum(map(len, expected))


def test_what_it_says() -> None:
    plan = _plan()
    words = "3 for 2 updates, 5 for 11 samples, then 8"
    assert plan.describe()[0] == f"global batch {words} samples = up to 2 ranks x 2 micro-steps of at most 2"
    assert plan.as_dict()["schedule"] == [{"global_size": 3, "updates": 2}, {"global_size": 5, "samples": 11}]
    assert plan.largest == 8
    assert plan.rows == 2
    assert _plan(micro_batch_size=8).rows == 4  # of the largest window
    assert _plan(stages=(Stage(20, 1, "updates"),), micro_batch_size=20).rows == 10
    lengths = np.array([1, 3] * 11)
    assert padding_share(lengths, plan, grouped=True) < padding_share(lengths, plan, grouped=False)


def test_its_position_is_that_of_no_other_plan() -> None:
    plan, other = _plan(), _plan(stages=(Stage(3, 3, "updates"), Stage(5, 11, "samples")))
    plain = BatchPlan(samples=22, global_batch_size=8, micro_batch_size=2, world_size=2)
    assert position_mismatch(plan.position, _plan(world_size=3, micro_batch_size=1).position) is None
    for saved, current, key in (
        (plan, other, "batch.schedule"),
        (plain, plan, "batch.schedule"),
        (plan, plain, "batch.global_size"),
    ):
        mismatch = position_mismatch(saved.position, current.position)
        assert mismatch is not None
        assert mismatch[0] == key
    tokens, shorter = (_plan(stages=(Stage(3, 9, "tokens"),), lengths=n).position for n in (4, 5))
    assert position_mismatch(tokens, shorter) == ("tokens of a sample", 4, 5)
    lengths = np.arange(22)
    there, back = (_plan(stages=(Stage(3, 9, "tokens"),), lengths=n).position for n in (lengths, lengths[::-1]))
    mismatch = position_mismatch(there, back)  # as many in all, but a stage ends elsewhere
    assert mismatch is not None
    assert mismatch[0] == "tokens of each sample (a hash)"


@pytest.mark.parametrize("lengths", [3, np.arange(1, 23)])
def test_a_stage_that_never_ends_and_epochs_without_end(lengths: Any) -> None:
    for unit in ("updates", "samples", "tokens"):
        plan = _plan(stages=(Stage(4, 2, "updates"), Stage(9, 2**70, unit)), lengths=lengths)
        first, second = plan.epoch(0), plan.epoch(1)
        assert [len(first.window(k)) for k in range(first.windows_per_epoch)] == [4, 4, 9, 5]
        assert [len(second.window(k)) for k in range(second.windows_per_epoch)] == [9, 9, 4]
    plan = _plan(lengths=lengths)
    assert plan.updates(10**12) == plan.updates(2) + 3 * (10**12 - 2)
    assert plan.epoch(10**12).windows_per_epoch == 3


@pytest.mark.parametrize(
    ("data", "sizes", "message"),
    [
        ({"train": iter(())}, {}, r"batch\.schedule=3 for 2 updates: the data is a stream"),
        ({}, {"global_batch_size": None, "tokens": 5}, r"batch\.schedule=.*and batch\.tokens=5 is a budget"),
        ({}, {"stages": (Stage(3, 9, "tokens"),)}, r"batch\.schedule=3 for 9 tokens: the data does not say how long"),
        (
            {},
            {"micro_batch_size": 9},
            r"batch\.micro_size=9: larger than every global batch of 3 for 2 updates, then 8",
        ),
    ],
)
def test_what_cannot_work_is_refused(data: dict[str, Any], sizes: dict[str, Any], message: str) -> None:
    source = DataSpec(**({"train": list(range(10))} | data))
    stated: dict[str, Any] = {
        "global_batch_size": 8,
        "tokens": None,
        "micro_batch_size": 1,
        "stages": (Stage(3, 2, "updates"),),
        "world_size": 1,
        "seed": 0,
        "names": CONFIG_KEYS,
    }
    with pytest.raises(ConfigError, match=message):
        make_plan(source, **(stated | sizes))


def test_tokens_are_those_of_the_samples() -> None:
    stages, sizes = (Stage(2, 12, "tokens"),), {"global_batch_size": 8, "tokens": None, "micro_batch_size": 1}
    for source in (
        DataSpec(train=list(range(20)), sample_tokens=3, shuffle=False),
        DataSpec(train=list(range(20)), lengths=np.array([3] * 20), shuffle=False),
    ):
        plan = make_plan(source, **sizes, stages=stages, world_size=1, seed=0)  # type: ignore[arg-type]
        assert isinstance(plan, ScheduledPlan)
        first = plan.epoch(0)
        assert [len(first.window(k)) for k in range(first.windows_per_epoch)] == [2, 2, 8, 8]
