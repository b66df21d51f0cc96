"""Gradients that are NaN or infinite on one rank: one decision for all, and nothing of them is left behind."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from tests.distributed.workers.overflow import MICRO_SIZE, MICRO_STEPS, Case, cases, chosen_cases
from tests.support.answers import answer

pytestmark = pytest.mark.slow

LAUNCHED = {2: ("scalers", "matrix", "endings"), 3: ("scalers", "matrix")}
Ranks = list[dict[str, Any]]

classes = pytest.mark.parametrize(
    "scaler",
    [
        "ours",
        pytest.param(
            "torch's",
            marks=pytest.mark.xfail(strict=False, raises=(AssertionError, KeyError), reason="a defect of torch's"),
        ),
    ],
)


@cache
def _launched(world: int, *parts: str) -> Ranks:
    """By rank, what the worker found: all of it in one launch each."""
    found: Ranks = answer("overflow", *(parts or LAUNCHED[world]), world=world, timeout=150)
    return found


each_world = pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.heavy)])


def _everyone(world: int, part: str, key: Any) -> list[Any]:
    return [rank[part][key] for rank in _launched(world)]


@classes
@each_world
def test_without_unscale_the_fused_path_decides_for_all_ranks(scaler: str, world: int) -> None:
    """Torch's: each for itself; the rank that found nothing stepped, and went on at another scale."""
    found = _everyone(world, "scalers", f"{scaler}, 1 spoiled, fused")
    assert [rank["scale"] for rank in found] == [8.0] * world
    assert [rank["stepped"] for rank in found] == [False] * world
    assert all(rank["finite"] and rank["moved"] for rank in found)


@classes
@each_world
def test_what_several_ranks_found_is_not_added_up(scaler: str, world: int) -> None:
    """Torch's sum is 2.0, which a fused kernel, asked whether it is 1.0, takes for finite: it steps by infinity."""
    found = _everyone(world, "scalers", f"{scaler}, {world} spoiled, unscale_, fused")
    for rank in found:
        assert not rank["stepped"]
        assert rank["finite"]
        assert rank["moved"]  # in the good window that follows
        assert rank["found"] == [[0.0, 0], [1.0, 0], [0.0, 0]]  # value and dimensions
        assert rank["scale"] == 8.0


@each_world
def test_every_way_to_call_it_is_one_decision(world: int) -> None:
    ways = [key for key in _launched(world)[0]["scalers"] if key.startswith("ours")]
    assert len(ways) == 8
    for way in ways:
        for rank in _everyone(world, "scalers", way):
            seen = {key: rank[key] for key in ("stepped", "scale", "finite", "moved")}
            assert seen == {"stepped": False, "scale": 8.0, "finite": True, "moved": True}, way


@each_world
def test_one_spoiled_value_skips_its_window_and_nothing_else(world: int) -> None:
    assert len(chosen_cases(world)) >= 14
    for i, case in enumerate(chosen_cases(world)):
        _check(_everyone(world, "matrix", i), case)


@pytest.mark.heavy
def test_the_whole_matrix() -> None:
    launched = _launched(2, "whole matrix")
    assert len(cases(2)) == 96
    for i, case in enumerate(cases(2)):
        _check([rank["whole matrix"][i] for rank in launched], case)


def _check(found: list[Any], case: Case) -> None:
    """The window of ``case`` was skipped on all ranks; the others went on bit by bit as without it."""
    world = len(found)
    # It was where it is meant to have been.
    assert [rank["seen"] for rank in found] == [
        [[1, case.micro_step]] if rank == case.rank else [] for rank in range(world)
    ]
    for rank in found:
        assert rank["applied"] == [True, False, True]
        assert rank["unchanged"]  # weights and the state of both optimizers, bit by bit
        assert rank["moved"]
        assert rank["as without it"]  # bit by bit
        assert rank["weights"] == found[0]["weights"]
        assert rank["scales"] == ([1024.0, 1024.0, 512.0, 512.0] if case.precision == "fp16" else [1.0] * 4)
    if case.level == 1:
        return
    samples = MICRO_SIZE * MICRO_STEPS * world
    for rank in found:
        first, bad, last = rank["clocks"]
        assert bad == first | {
            "window": 2,
            "epoch_window": 2,
            "samples": 2 * samples,
            "tokens": 2 * samples,
            "skipped": 1,
            "nonfinite": 1,
        }
        assert (first["step"], last["step"], last["nonfinite"], last["window"]) == (1, 2, 1, 3)
        assert [rank["rates"][0], rank["rates"][2]] == rank["reference rates"]
        assert rank["rates"][0] != rank["rates"][2]
    # Ours is set before a step, torch's is stepped after an update.
    after_bad = {"ours": found[0]["rates"][2], "torch's": found[0]["rates"][0]}[case.scheduler]
    assert [rank["rates"][1] for rank in found] == [after_bad] * world


@pytest.mark.fault("the loss scale falls to its floor")
def test_200_overflows_end_at_the_floor_and_a_good_window_still_trains() -> None:
    found = _everyone(2, "endings", "200 overflows")
    for rank in found:
        assert rank["message"] == ""
        assert rank["applied"] == [0, 201, 202]
        falling = [2.0**16] + [2.0 ** max(16 - i, 0) for i in range(200)]
        assert rank["scales"] == [*falling, 1.0, 1.0, 1.0]
        assert rank["finite"]
        assert rank["weights"] == found[0]["weights"]
        assert (rank["clocks"]["step"], rank["clocks"]["nonfinite"], rank["clocks"]["window"]) == (3, 200, 203)


def _said_by_all(found: list[Any], *parts: str) -> None:
    (message,) = {rank["message"] for rank in found}
    assert not [part for part in parts if part not in message], message
    for rank in found:
        assert rank["untouched"]
        assert rank["untouched at the end"]
        assert rank["finite"]
        assert rank["weights"] == found[0]["weights"]


@pytest.mark.fault("gradients that overflow at the floor of the loss scale too")
@pytest.mark.parametrize("by", ["step", "backward"])
def test_overflows_that_the_floor_does_not_end_end_the_run_on_all_ranks_alike(
    by: str, says: Callable[[str], None]
) -> None:
    found = _everyone(2, "endings", f"by default, {by}")
    says(found[0]["message"])
    for rank in found:  # one good window, 16 that take the scale from 2**16 to 1, and 10 more
        assert (rank["attempts"], rank["applied"]) == (27, [0])
        assert rank["scales"][-10:] == [1.0] * 10
        assert (rank["clocks"]["step"], rank["clocks"]["nonfinite"]) == (1, 26)
    _said_by_all(
        found,
        "window 27 is NaN or infinite",
        "10 in a row",
        "loss scale 1",
        "of b.0.weight",
        "step 1",
        "rank 0: 312, 313, 314, 315, 316, 317",
        "rank 1: 318, 319, 320, 321, 322, 323",
    )
    if by == "step":  # the loss is known, so the window can be looked into
        _said_by_all(found, "It began on rank 1 in micro-batch 1 (samples 320, 321)")
