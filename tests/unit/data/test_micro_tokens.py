"""Limits of padded tokens: disjoint, complete, within the limit, and windows that are the other plan's."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distaccum import CrossEntropy, DataSpec, PadCollator, RunConfig
from distaccum.data.counter import GlobalCounter
from distaccum.data.factory import build_loader, make_plan
from distaccum.data.loader import MicroBatchIds, padding_share
from distaccum.data.plan.batch import CONFIG_KEYS, BatchPlan, Plan, Resize, ResizedPlan
from distaccum.data.plan.scheduled import ScheduledPlan, Stage
from distaccum.data.plan.tokens import MicroTokenPlan, TokenPlan, cut_in_order, divisible
from distaccum.distributed.random import keys_of
from distaccum.distributed.world import World
from distaccum.errors import ConfigError
from distaccum.tools.host_memory import window_memory
from distaccum.tools.plan.command import job_of
from distaccum.train.components import build_components

LENGTHS = np.random.default_rng(0).integers(1, 40, 50)
SAMPLES: Any = [(torch.full((int(n),), i), torch.full((int(n),), i)) for i, n in enumerate(LENGTHS)]
SOURCE = DataSpec(train=SAMPLES, lengths=LENGTHS, collate=PadCollator((0, -100)))
SIZES: dict[str, Any] = {"global_batch_size": 16, "tokens": None, "micro_batch_size": 4, "world_size": 2, "seed": 0}


def _padded(lengths: list[int], multiple: int) -> int:
    """Rows times columns of the tensor that such samples make."""
    return len(lengths) * -(-max(lengths) // multiple) * multiple


def _greedy(lengths: list[int], most: int, multiple: int, samples: int) -> list[list[int]]:
    """One sample after the other, into the micro-batch before it where there is room."""
    parts: list[list[int]] = []
    for length in lengths:
        if parts and len(parts[-1]) < samples and _padded([*parts[-1], length], multiple) <= most:
            parts[-1].append(length)
        else:
            parts.append([length])
    return parts


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=70),
    most=st.integers(48, 400),
    multiple=st.integers(1, 8),
    samples=st.integers(1, 9) | st.just(1000),
)
def test_a_cut_is_that_of_a_loop_over_the_samples(lengths: list[int], most: int, multiple: int, samples: int) -> None:
    tokens_of = PadCollator((), pad_to_multiple_of=multiple).tokens_of
    limit = None if samples == 1000 else samples
    found = cut_in_order(np.array(lengths), most, tokens_of, samples=limit)
    assert found == [len(part) for part in _greedy(lengths, most, multiple, samples)]


@pytest.mark.parametrize(
    ("sizes", "ranks", "expected"),
    [
        ([5, 3, 4], 3, [5, 3, 4]),
        ([5, 3, 4], 2, [3, 2, 3, 4]),
        ([5, 3, 4], 5, [3, 2, 3, 2, 2]),
        ([2, 1], 4, [1, 1, 1]),  # fewer samples than ranks
        ([1, 1, 1], 2, [1, 1, 1]),
    ],
)
def test_the_largest_are_halved(sizes: list[int], ranks: int, expected: list[int]) -> None:
    assert divisible(sizes, ranks) == expected


def _plans(lengths: list[int], size: int, world: int, seed: int | None) -> dict[str, tuple[Plan, int]]:
    """Plans of every kind, and an epoch to look at."""
    sizes: dict[str, Any] = {"micro_batch_size": 1, "world_size": world, "seed": seed}
    n = len(lengths)
    size = min(size, n)
    change = Resize(global_batch_size=size, epoch=0, window=1, position=min(2, n - 1))
    stages = (Stage(2, 2, "updates"), Stage(3, 30, "tokens"))
    scheduled = ScheduledPlan(samples=n, stages=stages, global_batch_size=size, lengths=np.array(lengths), **sizes)
    return {
        "samples": (BatchPlan(samples=n, global_batch_size=size, **sizes), 1),
        "tokens": (TokenPlan(lengths=np.array(lengths), tokens=20 * size, **sizes), 1),
        "resized": (ResizedPlan(samples=n, global_batch_size=size, since=change, **sizes), 0),
        "scheduled": (scheduled, 0),
    }


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=60),
    size=st.integers(1, 30),
    most=st.integers(40, 300),
    multiple=st.sampled_from([1, 8]),
    world=st.integers(1, 5),
    seed=st.none() | st.integers(0, 9),
    grouped=st.booleans(),
    kind=st.sampled_from(["samples", "tokens", "resized", "scheduled"]),
)
def test_micro_batches_are_a_windows_samples_once_each_within_the_limit(
    *, lengths: list[int], size: int, most: int, multiple: int, world: int, seed: int | None, grouped: bool, kind: str
) -> None:
    whole, epoch = _plans(lengths, size, world, seed)[kind]
    collate = PadCollator((0, -100), pad_to_multiple_of=multiple)
    array = np.array(lengths)
    plan = MicroTokenPlan(
        plan=whole, lengths=array, micro_tokens=most, tokens_of=collate.tokens_of, grouped=grouped, limits_samples=False
    )
    cut, alone = plan.epoch(epoch), whole.epoch(epoch)
    assert cut.windows_per_epoch == alone.windows_per_epoch
    ids = [MicroBatchIds(plan, rank) for rank in range(world)]
    for k in range(1 if kind == "resized" else 0, cut.windows_per_epoch):
        window = cut.window(k)
        assert window == alone.window(k)
        samples = whole.ids(epoch, np.arange(window.start, window.stop)).tolist()
        shares = [list(one.of_window(cut, epoch, k)) for one in ids]
        assert sorted(i for share in shares for part in share for i in part) == sorted(samples)
        for share in shares:
            assert all(_padded([lengths[i] for i in part], multiple) <= most for part in share)
        for one, share in zip(ids, shares, strict=True):
            firsts = [window.start + samples.index(part[0]) for part in share]
            assert [int(positions[0]) for positions in one.positions(cut, k)] == firsts
        steps = [len(share) for share in shares]
        if not grouped:
            for rank, share in enumerate(shares):
                begin, end = (len(window) * r // world for r in (rank, rank + 1))
                cuts = _greedy([lengths[i] for i in samples[begin:end]], most, multiple, 1000)
                assert [i for part in share for i in part] == samples[begin:end]
                assert [[lengths[i] for i in part] for part in share] == cuts
            continue
        ordered = sorted((lengths[i] for i in samples), reverse=True)
        fewest = len(_greedy(ordered, most, multiple, 1000))
        assert max(steps) == -(-fewest // world)  # nobody waits longer than the limit has it
        if -(-fewest // world) * world <= len(window):
            assert len(set(steps)) == 1
        dealt = [part for step in range(max(steps)) for share in shares for part in share[step : step + 1]]
        assert [lengths[i] for part in dealt for i in part] == ordered


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=60),
    size=st.integers(1, 30),
    world=st.integers(1, 4),
    grouped=st.booleans(),
    kind=st.sampled_from(["samples", "tokens"]),
)
def test_the_micro_steps_of_the_largest_window(
    *, lengths: list[int], size: int, world: int, grouped: bool, kind: str
) -> None:
    whole, _ = _plans(lengths, size, world, 3)[kind]
    given: dict[str, Any] = {"lengths": np.array(lengths), "micro_tokens": 60, "grouped": grouped}
    plan = MicroTokenPlan(plan=whole, tokens_of=PadCollator(()).tokens_of, limits_samples=False, **given)
    cut = plan.epoch(0)
    most = max(len(cut.micro_batches(k, rank)) for k in range(cut.windows_per_epoch) for rank in range(world))
    assert plan.items_of_window == plan.as_dict()["accumulation_steps"] == most
    parts = [part for k in range(cut.windows_per_epoch) for rank in range(world) for part in cut.micro_batches(k, rank)]
    assert max(map(len, parts)) <= plan.rows


def test_another_limit_is_another_cut_of_the_same_windows() -> None:
    plan = make_plan(SOURCE, **SIZES, micro_tokens=80, limits_samples=False, names=CONFIG_KEYS)
    assert isinstance(plan, MicroTokenPlan)
    other = replace(plan, micro_tokens=200)
    assert other.position == plan.position == make_plan(SOURCE, **SIZES, names=CONFIG_KEYS).position
    assert other.micro_steps < plan.micro_steps
    assert other.updates(3) == plan.updates(3) == 12
    assert (other.samples, other.world_size, other.seed, other.micro_batch_size) == (50, 2, 0, 4)
    with pytest.raises(
        ConfigError, match=r"^batch\.micro_tokens=37: the longest sample has 38 tokens\. Give at least 38"
    ):
        replace(plan, micro_tokens=37)


def test_what_it_says() -> None:
    both = make_plan(SOURCE, **SIZES, micro_tokens=2000)
    assert isinstance(both, MicroTokenPlan)
    said = "global batch 16 samples = 2 ranks x about {} of at most 2,000 padded tokens{}"
    epoch = "50 samples in 4 steps, the last of 2"
    assert both.describe() == [said.format("2 micro-steps", " and 4 samples"), epoch]
    tokens = replace(both, limits_samples=False)
    assert tokens.describe() == [said.format("1 micro-step", ""), epoch]
    found = {"micro_size": None, "micro_tokens": 2000, "accumulation_steps": 1, "windows_per_epoch": 4}
    assert tokens.as_dict().items() >= (found | {"global_size": 16, "unit": "samples"}).items()
    assert both.as_dict()["micro_size"] == 4
    assert (both.rows, tokens.rows) == (4, 50)


def test_a_schedule_is_reckoned_with_its_largest_window() -> None:
    plan = make_plan(SOURCE, **SIZES, stages=[Stage(2, 1000, "updates")], micro_tokens=80, limits_samples=False)
    plain = make_plan(SOURCE, **SIZES, micro_tokens=80, limits_samples=False)
    assert plan.items_of_window == plain.items_of_window


def test_padding_is_that_of_the_tensors(gloo_world: World) -> None:
    for grouped in (False, True):
        given: dict[str, Any] = {**SIZES, "world_size": 1, "group_by_length": grouped}
        plan = make_plan(SOURCE, **given, micro_tokens=120, limits_samples=False)
        loader = build_loader(SOURCE, plan, gloo_world, seed=5)
        real = padded = 0
        seen: list[int] = []
        counter = GlobalCounter(gloo_world, lambda batch: int((batch[1] >= 0).sum()))
        for window in loader.windows(0, 0, counter):
            for i, (micro, ids) in enumerate(zip(window.micro_batches, window.ids(), strict=True)):
                assert micro.batch[0].numel() <= 120
                assert micro.batch[0][:, 0].tolist() == list(ids)
                assert window.rows is not None
                assert window.rows(i) == len(ids)
                real, padded = real + int(micro.count), padded + micro.batch[0].numel()
                seen += ids
            order = plan.ids(0, np.arange(plan.samples)).tolist()  # type: ignore[union-attr]
            assert list(window.keys) == keys_of([order.index(ids[0]) for ids in window.ids()], 5, 0)
        assert sorted(seen) == list(range(50))
        assert real == LENGTHS.sum()
        assert padding_share(LENGTHS, plan, grouped=grouped, collate=SOURCE.collate) == 1 - real / padded  # type: ignore[arg-type]


def test_a_window_that_is_resized_keeps_its_limit(gloo_world: World) -> None:
    plan = make_plan(SOURCE, **{**SIZES, "world_size": 1}, micro_tokens=120, limits_samples=False)
    loader = build_loader(SOURCE, plan, gloo_world)
    counter = GlobalCounter(gloo_world, lambda batch: int((batch[1] >= 0).sum()))
    taken = [i for ids in next(iter(loader.windows(0, 0, counter))).ids() for i in ids]
    loader.resize(Resize(global_batch_size=20, epoch=0, window=1, position=16))
    sizes = []
    for window in loader.windows(0, 1, counter):
        parts = list(window.ids())
        assert all(_padded(LENGTHS[ids].tolist(), 1) <= 120 for ids in parts)
        sizes.append(sum(map(len, parts)))
        taken += [i for ids in parts for i in ids]
    assert sizes == [20, 14]
    assert sorted(taken) == list(range(50))


def test_the_memory_of_a_micro_batch_is_that_of_its_tokens() -> None:
    plan = make_plan(SOURCE, **SIZES, micro_tokens=400, limits_samples=False)
    found = window_memory(SOURCE, plan)  # type: ignore[arg-type]
    assert found.micro_batch == 400 * 2 * 8  # inputs and labels of 8 bytes
    assert found.micro_batches == plan.items_of_window


STREAM = DataSpec(train=iter([]))
REFUSED: list[tuple[DataSpec, int, str]] = [
    (replace(SOURCE, lengths=None), 80, "=80: the data does not say how long its samples are. Give lengths"),
    (replace(SOURCE, lengths=LENGTHS[1:]), 80, r"=80: the data gives lengths of shape \(49,\) for 50 samples"),
    (STREAM, 80, "=80: the data is a stream. Use batch.micro_size"),
    (SOURCE, 0, "=0: must be at least 1"),
    (SOURCE, 37, "=37: the longest sample has 38 tokens. Give at least 38, or cut the samples"),
    (
        replace(SOURCE, collate=PadCollator((0, -100), pad_to_multiple_of=64)),
        63,
        "=63: the longest sample has 38 tokens, which are padded to 64. Give at least 64",
    ),
    (replace(SOURCE, pad_rows=True, ignored={1: -100}), 80, "=80: the rows of micro-batches are filled up"),
]


@pytest.mark.parametrize(("source", "most", "message"), REFUSED)
def test_what_cannot_work_is_refused(source: DataSpec, most: int, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^batch\.micro_tokens{message}"):
        make_plan(source, **SIZES, micro_tokens=most, names=CONFIG_KEYS)


@pytest.mark.parametrize(
    ("batch", "samples", "evaluated"),
    [
        ({"micro_tokens": 120}, None, 8),
        ({"micro_tokens": 120, "micro_size": "auto"}, None, 8),
        ({"micro_tokens": "120", "micro_size": 3, "group_by_length": True}, 3, 3),
        ({"micro_tokens": 120, "global_size": None, "tokens": 200}, None, 8),
        ({"micro_tokens": 120, "global_size": 4, "schedule": [{"global_size": 2, "updates": 1}]}, None, 4),
    ],
)
def test_the_configurations_plan(batch: dict[str, Any], samples: int | None, evaluated: int) -> None:
    config = RunConfig.from_dict({"batch": batch})
    model = torch.nn.Linear(1, 1)
    plan = build_components(config, SOURCE, model, CrossEntropy(), world_size=2, device=torch.device("cpu")).plan
    assert isinstance(plan, MicroTokenPlan)
    assert (plan.micro_tokens, plan.grouped) == (120, config.batch.group_by_length)
    assert plan.as_dict()["micro_size"] == samples
    assert plan.micro_batch_size == evaluated


def test_it_is_not_planned_without_data() -> None:
    with pytest.raises(ConfigError, match=r"batch\.micro_tokens=120: cannot be planned without the data"):
        job_of(RunConfig.from_dict({"batch": {"micro_tokens": 120}}))
