"""Optimizer state on one rank each: the same weights as with all of it on every rank, bit by bit."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.workers.zero1 import MODELS
from tests.support.answers import answer

RUNS = [name + clip for name in MODELS for clip in ("", ", clipped")]
pytestmark = [pytest.mark.heavy, pytest.mark.parametrize("world", [2, 4], scope="module")]


@pytest.fixture(scope="module")
def launched(world: int) -> Any:
    return answer("zero1", world=world, timeout=200)


@pytest.mark.parametrize("name", RUNS)
def test_every_optimizer_steps_as_without_sharding(launched: dict[str, Any], name: str) -> None:
    for rank in launched["ranks"]:
        assert rank[name]["zero1"]["alike"]
        assert rank[name]["zero1"]["same"]


@pytest.mark.parametrize("name", RUNS)
def test_state_is_held_once_over_all_ranks(launched: dict[str, Any], name: str, world: int) -> None:
    ranks = [rank[name] for rank in launched["ranks"]]
    whole = ranks[0]["ddp"]["bytes"]
    assert whole > 0
    assert all(rank["ddp"]["bytes"] == whole for rank in ranks)
    shares = [rank["zero1"]["bytes"] for rank in ranks]
    assert sum(shares) == whole
    for i, held in enumerate(ranks[0]["ddp"]["held"]):
        assert sum(rank["zero1"]["held"][i] for rank in ranks) == held
    if name.startswith("AdamW"):  # what is dealt out are whole tensors
        assert max(shares) <= whole * (1 / world + launched["largest"] / launched["total"])


def test_a_rank_may_have_nothing_of_an_optimizer(launched: dict[str, Any], world: int) -> None:
    held = [rank["few"]["zero1"]["held"][0] for rank in launched["ranks"]]
    assert sorted(held) == [0] * (world - 1) + [1]
