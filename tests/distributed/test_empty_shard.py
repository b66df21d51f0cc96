"""Ranks without any data: the others' gradient is exact, and where nobody has any, all say so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.distributed.workers.empty_shard import HELD, expected
from tests.support.answers import answer
from tests.support.engine_matrix import in_groups

pytestmark = pytest.mark.slow
TOLERANCE = 1e-6  # of fp32 weights


each_engine = in_groups("launched")


@pytest.fixture(scope="module")
def launched(request: pytest.FixtureRequest) -> Any:
    """By rank, what the worker found: the engines of a group in one launch."""
    return answer("empty_shard", *request.param, warm="deepspeed", timeout=200)


@pytest.mark.fault(
    "a rank without data: fewer samples than ranks, or its stream is empty",
    group="numbers",
    does="trains on what the others have; the gradient is exact, on every engine",
)
@pytest.mark.parametrize("held", [name for name, (number, _) in HELD.items() if number])
@each_engine
def test_a_rank_without_data_adds_nothing(launched: list[dict[str, Any]], engine: str, held: str) -> None:
    for rank in launched:
        found = rank[engine][held]
        assert found["error"] == ""
        for weights, truth in zip(found["weights"], expected(HELD[held][0]), strict=True):
            assert weights == pytest.approx(truth, rel=TOLERANCE, abs=TOLERANCE)


@pytest.mark.fault(
    "the streams of all ranks are empty",
    group="numbers",
    does="ends on all ranks before the first step",
    says="epoch 0: the streams of all 2 ranks are empty",
)
@each_engine
def test_no_data_anywhere_is_an_error_on_all(
    launched: list[dict[str, Any]], engine: str, says: Callable[[str], None]
) -> None:
    for rank in launched:
        says(rank[engine]["no stream"]["error"])
        assert rank[engine]["no stream"]["error"].startswith("DataError: ")
