"""NaN on one rank, in each micro-step of a window, on every engine: all ranks stop alike, or skip the window."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.distributed.workers.nonfinite import CASES, GLOBAL_SIZE, MICRO_SIZE, RANKS, SHARE, rank_of
from tests.support.answers import answer
from tests.support.engine_matrix import in_groups

pytestmark = pytest.mark.slow


each_engine = in_groups("launched")


@pytest.fixture(scope="module")
def launched(request: pytest.FixtureRequest) -> Any:
    """By rank, what the worker found: the engines of a group in one launch."""
    return answer("nonfinite", *request.param, world=RANKS, warm="deepspeed", timeout=200)


@pytest.mark.fault(
    "NaN in the loss or the gradient of one rank, in any micro-step, with `trainer.nonfinite=stop`",
    group="numbers",
    does="ends on all ranks alike, on every engine; the weights are those of before the window",
    says="the gradient of window 2 is NaN or infinite (loss scale 1): of ... It began on rank ... in micro-batch ... "
    "(samples ...): ... Its samples are rank 0: ...; rank 1: ...",
)
@each_engine
def test_it_stops_all_ranks_and_names_the_one(
    launched: list[dict[str, Any]], engine: str, says: Callable[[str], None]
) -> None:
    for micro_step, kind, policy in CASES:
        found = [rank[engine][f"{micro_step}/{kind}/{policy}"] for rank in launched]
        if policy == "stop":
            assert found[0] == found[1]
            message = found[0]["message"]
            says(message)
            rank = rank_of(micro_step)
            sample = GLOBAL_SIZE + rank * SHARE + micro_step * MICRO_SIZE
            assert f"on rank {rank} in micro-batch {micro_step} (samples {sample}, {sample + 1})" in message
            assert (found[0]["applied"], found[0]["untouched"]) == ([True, False], [False, True])
            assert found[0]["weights"] == launched[0][engine]["first"]["weights"]


@pytest.mark.fault(
    "NaN in the loss or the gradient of one rank, in any micro-step, with `trainer.nonfinite=skip`",
    group="numbers",
    does="the window is skipped on all ranks; weights and optimizer go on bitwise as without it",
)
@each_engine
def test_it_skips_the_window_and_nothing_else(launched: list[dict[str, Any]], engine: str) -> None:
    for micro_step, kind, policy in CASES:
        found = [rank[engine][f"{micro_step}/{kind}/{policy}"] for rank in launched]
        if policy == "skip":
            assert found[0] == found[1]
            assert (found[0]["applied"], found[0]["untouched"]) == ([True, False, True], [False, True, False])
            assert found[0]["message"] == ""
            assert found[0]["weights"] == launched[0][engine]["without"]["weights"]
