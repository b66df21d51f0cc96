"""Plans of windows: of a number of samples, a budget of tokens, a schedule; and the order of samples."""

import tracemalloc
from bisect import bisect_right
from dataclasses import replace
from hashlib import blake2b
from itertools import accumulate
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
from distaccum.data.plan.shuffle import Shuffle, Weights
from distaccum.data.plan.stream import StreamPlan
from distaccum.data.plan.tokens import TokenPlan
from distaccum.data.spec import DataSpec
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
    ("plan", "changes", "said"),
    [
        (BatchPlan, {"global_batch_size": 0}, "^global_batch_size=0"),
        (BatchPlan, {"micro_batch_size": -1}, "^micro_batch_size=-1"),
        (BatchPlan, {"micro_batch_size": 9}, "^micro_batch_size=9"),
        (BatchPlan, {"samples": 0}, "^data: the training set holds no samples"),
        (TokenPlan, {"tokens": 0}, "^tokens=0: must be at least 1"),
        (TokenPlan, {"micro_batch_size": 0}, "^micro_batch_size=0"),
        (TokenPlan, {"lengths": np.array([], dtype=np.int64)}, "holds no samples"),
    ],
)
def test_impossible_plans_name_the_key(plan: Any, changes: dict[str, Any], said: str) -> None:
    by_samples, by_tokens = {"samples": 10, "global_batch_size": 8}, {"lengths": np.array([1]), "tokens": 4}
    sizes = (by_samples if plan is BatchPlan else by_tokens) | {"micro_batch_size": 2, "world_size": 1}
    with pytest.raises(ConfigError, match=said):
        plan(**(sizes | changes))


def test_no_window_outside_the_epoch() -> None:
    plan = BatchPlan(samples=10, global_batch_size=8, micro_batch_size=2, world_size=1)
    with pytest.raises(IndexError, match="window 2 of an epoch of 2"):
        plan.window(2)


@given(
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=60),
    tokens=st.integers(1, 60),
    micro=st.integers(1, 5),
    world=st.integers(1, 5),
    seed=st.none() | st.integers(0, 9),
    epoch=st.integers(0, 3),
)
def test_windows_are_as_full_as_the_budget_allows(
    *, lengths: list[int], tokens: int, micro: int, world: int, seed: int | None, epoch: int
) -> None:
    def plan(world: int, micro: int) -> TokenPlan:
        return TokenPlan(lengths=np.array(lengths), tokens=tokens, micro_batch_size=micro, world_size=world, seed=seed)

    cut, alone = plan(world, micro).epoch(epoch), plan(1, 1).epoch(epoch)
    order = plan(world, micro).ids(epoch, np.arange(len(lengths)))
    assert sorted(order) == list(range(len(lengths)))
    position = 0
    for k in range(cut.windows_per_epoch):
        window = cut.window(k)
        assert window == alone.window(k)
        assert window.start == position
        held = [lengths[i] for i in order[window.start : window.stop]]
        assert sum(held) <= tokens or len(held) == 1
        if window.stop < len(lengths):  # one more would not have fitted
            assert sum(held) + lengths[order[window.stop]] > tokens
        shares = [cut.micro_batches(k, rank) for rank in range(world)]
        assert sorted(p for share in shares for batch in share for p in batch) == list(window)
        assert all(len(batch) <= micro for share in shares for batch in share)
        position = window.stop
    assert position == len(lengths)
    assert plan(world, micro).updates(epoch + 1) == sum(plan(1, 1).epoch(e).windows_per_epoch for e in range(epoch + 1))


@given(
    wanted=st.integers(0, 50), alive=st.lists(st.booleans(), min_size=1, max_size=8).filter(any), batched=st.booleans()
)
def test_what_a_stream_window_wants_is_asked_of_the_living_in_equal_parts(
    wanted: int, alive: list[bool], batched: bool
) -> None:
    plan = StreamPlan(global_batch_size=8, micro_batch_size=2, world_size=len(alive), batched=batched)
    quotas = [plan.quota(wanted, alive, rank) for rank in range(len(alive))]
    assert sum(quotas) == wanted
    asked = [quota for quota, lives in zip(quotas, alive, strict=True) if lives]
    assert max(asked) - min(asked) <= 1
    assert all(quota == 0 for quota, lives in zip(quotas, alive, strict=True) if not lives)
    assert [plan.wanted(samples) for samples in (0, 7, 8)] == ([4, 0, 0] if batched else [8, 1, 0])


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
def test_a_schedule_that_cannot_work_is_refused(data: dict[str, Any], sizes: dict[str, Any], message: str) -> None:
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


@pytest.mark.parametrize("samples", [1, 2, 3, 4, 5, 7, 16, 17, 100, 1023, 1024, 1025, 50_000])
def test_it_is_a_permutation(samples: int) -> None:
    ids = Shuffle(samples, seed=3, epoch=1)(np.arange(samples))
    assert sorted(ids.tolist()) == list(range(samples))


def test_it_depends_on_seed_and_epoch_and_nothing_else() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return Shuffle(1000, seed=seed, epoch=epoch)(np.arange(1000)).tolist()

    assert order(0, 0) == order(0, 0)
    assert len({tuple(order(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9


def test_a_lookup_is_the_same_alone_as_among_others_and_neighbours_part() -> None:
    shuffle = Shuffle(1000, seed=0, epoch=0)
    whole = shuffle(np.arange(1000))
    assert [int(shuffle(np.array([i]))[0]) for i in range(0, 1000, 77)] == whole[::77].tolist()
    ids = Shuffle(100_000, seed=0, epoch=0)(np.arange(100_000))
    assert np.mean(np.abs(np.diff(ids)) == 1) < 1e-3


@pytest.mark.slow
def test_every_position_receives_every_sample_about_equally_often() -> None:
    samples, trials = 20, 4000
    counts = np.zeros((samples, samples))
    for epoch in range(trials):
        counts[np.arange(samples), Shuffle(samples, seed=1, epoch=epoch)(np.arange(samples))] += 1
    expected = trials / samples
    chi_square = ((counts - expected) ** 2 / expected).sum()
    freedom = (samples - 1) ** 2
    assert abs(chi_square - freedom) < 6 * np.sqrt(2 * freedom)  # six standard deviations of the chi-square law


def test_a_billion_samples_cost_nothing_to_hold() -> None:
    tracemalloc.start()
    ids = Shuffle(10**12, seed=0, epoch=0)(np.arange(64))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(set(ids.tolist())) == 64
    assert ids.min() >= 0
    assert ids.max() < 10**12
    assert peak < 100_000


def _drawn_by_hand(weights: list[float], seed: int, epoch: int, position: int) -> int:
    """SplitMix64 in whole numbers, and the sample in whose part of the sum its number lies."""
    key = int.from_bytes(blake2b(f"weights/{seed}/{epoch}".encode(), digest_size=8).digest(), "little")
    z = (key + (position + 1) * 0x9E3779B97F4A7C15) % 2**64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ z >> shift) * factor % 2**64
    return bisect_right(list(accumulate(weights)), ((z ^ z >> 31) >> 11) / 2**53 * sum(weights))


@pytest.mark.parametrize(
    "sizes",
    [
        {"global_batch_size": 16, "tokens": None},
        {"global_batch_size": None, "tokens": 300},
        {"global_batch_size": 16, "tokens": None, "stages": [Stage(8, 100, "tokens")]},
        {"global_batch_size": 16, "tokens": None, "micro_tokens": 100, "group_by_length": True},
    ],
)
def test_weights_draw_what_no_division_changes(sizes: dict[str, Any]) -> None:
    weights = [0.0, *np.random.default_rng(0).exponential(size=98).tolist(), 0.0]
    lengths = np.random.default_rng(1).integers(1, 40, 100)
    data = DataSpec(train=list(range(100)), weights=weights, lengths=lengths)
    expected = [_drawn_by_hand(weights, 7, 1, position) for position in range(100)]
    for world, micro in ((1, 8), (3, 2)):
        plan: Any = make_plan(data, micro_batch_size=micro, world_size=world, seed=7, **sizes)
        cut, taken, filled = plan.epoch(1), list[int](), list[int]()
        for k in range(cut.windows_per_epoch):
            own = [micro for rank in range(world) for micro in cut.micro_batches(k, rank)]
            ids = [i for positions in own for i in plan.ids(1, np.asarray(positions, dtype=np.int64)).tolist()]
            assert sorted(ids) == sorted(expected[len(taken) : len(taken) + len(ids)])
            taken, filled = taken + ids, [*filled, int(lengths[ids].sum())]
        assert len(taken) == 100
        assert sizes["tokens"] is None or max(filled) <= 300
        other: Any = make_plan(replace(data, weights=weights[::-1]), micro_batch_size=2, world_size=1, seed=7, **sizes)
        unweighted: Any = make_plan(replace(data, weights=None), micro_batch_size=2, world_size=1, seed=7, **sizes)
        assert plan.position["seed"] not in (other.position["seed"], unweighted.position["seed"])
    found = np.bincount(Weights(np.array(weights)).draw(0, 0, np.arange(200_000)), minlength=100)
    wanted = 200_000 * np.array(weights) / sum(weights)
    assert (np.abs(found - wanted) <= 5 * np.sqrt(wanted)).all()
