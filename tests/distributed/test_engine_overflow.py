"""One pattern of overflows: the same windows are skipped, at the same scales, on every engine."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from tests.distributed.workers.engine_overflow import CASES, RANKS, WINDOWS, expected
from tests.support.answers import answer
from tests.support.engine_matrix import in_groups

pytestmark = pytest.mark.slow

TOLERANCE = 1e-6  # of fp32 weights


each_engine = in_groups("launched")


@pytest.fixture(scope="module")
def launched(request: pytest.FixtureRequest) -> Any:
    """By rank, what the worker found: the engines of a group in one launch."""
    return answer("engine_overflow", *request.param, world=RANKS, warm="deepspeed", timeout=200)


@pytest.mark.parametrize(
    "case", range(len(CASES)), ids=lambda i: f"{CASES[i].precision}-hysteresis{CASES[i].hysteresis}"
)
@each_engine
def test_the_same_windows_are_skipped_at_the_same_scales(
    launched: list[dict[str, Any]], engine: str, case: int
) -> None:
    truth = expected(CASES[case])
    assert [window["applied"] for window in truth] == [kind == "." for kind in WINDOWS]
    for rank in launched:
        found = rank[engine][case]
        for key in ("applied", "scale", "step"):
            assert [window[key] for window in found["windows"]] == [window[key] for window in truth], key
        assert found["touched by a skip"] == []
        assert found["rows differ by"] <= TOLERANCE
        for window, true in zip(found["windows"], truth, strict=True):
            assert window["row"] == pytest.approx(true["row"], rel=TOLERANCE, abs=TOLERANCE)


def test_the_pattern_goes_through_every_kind_of_change() -> None:
    """Growth, ceiling, backoff, floor, and with hysteresis a skip that leaves the scale."""
    scales = [[window["scale"] for window in expected(case)] for case in CASES]
    assert {1.0} == set(scales[2])
    for one in scales[:2]:
        steps = {after / before for before, after in pairwise(one)}
        assert steps == {0.5, 1.0, 2.0}
        assert one[-1] == min(one) == 1.0
    assert scales[0] != scales[1]
