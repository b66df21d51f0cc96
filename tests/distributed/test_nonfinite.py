"""Windows that go wrong on one rank, on every engine: with a NaN, with overflows, and without any data."""

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import pytest

from tests.distributed.workers import engine_overflow as overflow
from tests.distributed.workers.empty_shard import HELD, expected
from tests.distributed.workers.nonfinite import CASES, GLOBAL_SIZE, MICRO_SIZE, SHARE, rank_of
from tests.support.answers import answer
from tests.support.engine_matrix import in_groups

pytestmark = pytest.mark.slow
TOLERANCE = 1e-6  # of fp32 weights

each_engine = in_groups("launched")


@pytest.fixture(scope="module")
def launched(request: pytest.FixtureRequest) -> Callable[[str], Any]:
    """By rank, what a worker found: the engines of a group in one launch."""
    return cache(lambda worker: answer(worker, *request.param, warm="deepspeed", timeout=200))


@pytest.mark.fault("NaN in the loss or the gradient of one rank, in any micro-step, with `trainer.nonfinite=stop`")
@each_engine
def test_it_stops_all_ranks_and_names_the_one(
    launched: Callable[[str], Any], engine: str, says: Callable[[str], None]
) -> None:
    for micro_step, kind, policy in CASES:
        found = [rank[engine][f"{micro_step}/{kind}/{policy}"] for rank in launched("nonfinite")]
        if policy == "stop":
            assert found[0] == found[1]
            message = found[0]["message"]
            says(message)
            rank = rank_of(micro_step)
            sample = GLOBAL_SIZE + rank * SHARE + micro_step * MICRO_SIZE
            assert f"on rank {rank} in micro-batch {micro_step} (samples {sample}, {sample + 1})" in message
            assert (found[0]["applied"], found[0]["untouched"]) == ([True, False], [False, True])
            assert found[0]["weights"] == launched("nonfinite")[0][engine]["first"]["weights"]


@pytest.mark.fault("NaN in the loss or the gradient of one rank, in any micro-step, with `trainer.nonfinite=skip`")
@each_engine
def test_it_skips_the_window_and_nothing_else(launched: Callable[[str], Any], engine: str) -> None:
    for micro_step, kind, policy in CASES:
        found = [rank[engine][f"{micro_step}/{kind}/{policy}"] for rank in launched("nonfinite")]
        if policy == "skip":
            assert found[0] == found[1]
            assert (found[0]["applied"], found[0]["untouched"]) == ([True, False, True], [False, True, False])
            assert found[0]["message"] == ""
            assert found[0]["weights"] == launched("nonfinite")[0][engine]["without"]["weights"]


@pytest.mark.parametrize(
    "case", range(len(overflow.CASES)), ids=[f"{one.precision}-hysteresis{one.hysteresis}" for one in overflow.CASES]
)
@each_engine
def test_the_same_windows_are_skipped_at_the_same_scales(
    launched: Callable[[str], Any], engine: str, case: int
) -> None:
    truth = overflow.expected(overflow.CASES[case])
    assert [window["applied"] for window in truth] == [kind == "." for kind in overflow.WINDOWS]
    for rank in launched("engine_overflow"):
        found = rank[engine][case]
        for key in ("applied", "scale", "step"):
            assert [window[key] for window in found["windows"]] == [window[key] for window in truth], key
        assert found["touched by a skip"] == []
        assert found["rows differ by"] <= TOLERANCE
        for window, true in zip(found["windows"], truth, strict=True):
            assert window["row"] == pytest.approx(true["row"], rel=TOLERANCE, abs=TOLERANCE)


def test_the_pattern_goes_through_every_kind_of_change() -> None:
    """Growth, ceiling, backoff, floor, and with hysteresis a skip that leaves the scale."""
    scales = [[window["scale"] for window in overflow.expected(case)] for case in overflow.CASES]
    assert {1.0} == set(scales[2])
    for one in scales[:2]:
        steps = {after / before for before, after in pairwise(one)}
        assert steps == {0.5, 1.0, 2.0}
        assert one[-1] == min(one) == 1.0
    assert scales[0] != scales[1]


@pytest.mark.fault("a rank without data: fewer samples than ranks, or its stream is empty")
@pytest.mark.parametrize("held", [name for name, (number, _) in HELD.items() if number])
@each_engine
def test_a_rank_without_data_adds_nothing(launched: Callable[[str], Any], engine: str, held: str) -> None:
    for rank in launched("empty_shard"):
        found = rank[engine][held]
        assert found["error"] == ""
        for weights, truth in zip(found["weights"], expected(HELD[held][0]), strict=True):
            assert weights == pytest.approx(truth, rel=TOLERANCE, abs=TOLERANCE)


@pytest.mark.fault("the streams of all ranks are empty")
@each_engine
def test_no_data_anywhere_is_an_error_on_all(
    launched: Callable[[str], Any], engine: str, says: Callable[[str], None]
) -> None:
    for rank in launched("empty_shard"):
        says(rank[engine]["no stream"]["error"])
        assert rank[engine]["no stream"]["error"].startswith("DataError: ")
