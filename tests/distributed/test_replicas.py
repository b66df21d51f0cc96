"""Ranks whose weights have diverged are named within the next windows, at no collective of their own."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.answers import answer


@pytest.fixture(scope="module")
def found() -> Any:
    return answer("replicas")


@pytest.mark.slow
def test_ranks_that_agree_train_to_the_end(found: dict[str, Any]) -> None:
    for rank in found["clean"]:
        assert rank == {"said": "", "windows": 8, "every": 2}


@pytest.mark.parametrize(("case", "name"), [("a flipped bit", "4.weight"), ("a bias of ones", "2.bias")])
def test_a_change_on_one_rank_ends_the_run_on_all(found: dict[str, Any], case: str, name: str) -> None:
    first, second = found[case]
    assert first == second
    assert "ranks differ: 0 against 1" in first["said"]
    assert name in first["said"]
    assert first["windows"] <= 2 + first["every"]


def test_a_run_may_be_told_to_go_on(found: dict[str, Any]) -> None:
    assert [rank["windows"] for rank in found["warn"]] == [8, 8]


def test_it_costs_at_most_a_hundredth_of_the_operators(found: dict[str, Any]) -> None:
    for riding, plain in found["operators"]:
        assert riding <= 1.01 * plain
        assert riding > plain  # one of the windows did compare
