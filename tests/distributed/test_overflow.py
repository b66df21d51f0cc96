"""Gradients that are NaN or infinite on one rank: one decision for all, and nothing of them is left behind."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from tests.distributed.workers.overflow import MICRO_SIZE, MICRO_STEPS, Case, cases, chosen_cases
from tests.support.answers import answer

pytestmark = pytest.mark.slow

LAUNCHED = {2: ("scalers", "matrix", "first windows", "endings"), 3: ("scalers", "matrix", "first windows")}
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


def _name(case: Case) -> str:
    fused = "+".join("fused" if on else "plain" for on in case.fused)
    place = f"{case.value:g} in {case.branch}, micro-step {case.micro_step}, rank {case.rank}"
    return f"level {case.level}, {case.precision}, {fused}, {place}, {case.scheduler} schedule"


CASES = [(world, i, case) for world in LAUNCHED for i, case in enumerate(chosen_cases(world))]


@pytest.mark.parametrize(
    ("world", "i", "case"),
    [
        pytest.param(*where, id=f"{where[0]} ranks, {_name(where[2])}", marks=pytest.mark.heavy if where[0] > 2 else ())
        for where in CASES
    ],
)
def test_one_spoiled_value_skips_its_window_and_nothing_else(world: int, i: int, case: Case) -> None:
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


@each_world
def test_a_very_first_window_that_is_spoiled_leaves_no_state(world: int) -> None:
    """What fused kernels would have made in it, they would have made of memory as they found it."""
    for rank in _launched(world):
        assert len(rank["first windows"]) >= 3
        for found in rank["first windows"]:
            assert found == {"applied": [False, True, True], "state made": 0, "as without it": True}


@pytest.mark.fault(
    "the loss scale falls to its floor",
    group="numbers",
    does="stays there, and a good window trains; an alert on the console and in W&B",
    says="the loss scale has collapsed: it has fallen to its minimum, 4, at step ...",
)
@pytest.mark.parametrize("way", ["step, fused", "backward, plain"])
def test_200_overflows_end_at_the_floor_and_a_good_window_still_trains(way: str) -> None:
    found = _everyone(2, "endings", f"200 overflows, {way}")
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


@pytest.mark.fault(
    "gradients that overflow at the floor of the loss scale too",
    group="numbers",
    does="ends on all ranks alike after ten in a row; the weights are those of before",
    says="the gradient of window 27 is NaN or infinite (10 in a row, loss scale 1): of ...",
)
@pytest.mark.parametrize("by", ["step", "backward"])
def test_overflows_that_the_floor_does_not_end_end_the_run_on_all_ranks_alike(
    by: str, says: Callable[[str], None]
) -> None:
    found = _everyone(2, "endings", f"overflows by default, {by}")
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


@pytest.mark.parametrize("by", ["step", "backward"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_where_no_scale_can_fall_the_first_one_stops_the_run_or_several_in_a_row(precision: str, by: str) -> None:
    names = "of a.0.weight, a.0.bias, a.2.weight, a.2.bias"
    stopped = _everyone(2, "endings", f"stop, {precision}, {by}")
    assert [(rank["attempts"], rank["applied"]) for rank in stopped] == [(2, [0])] * 2
    _said_by_all(stopped, "window 2 is NaN or infinite", names, "rank 0: 12, 13, 14, 15, 16, 17", "step 1")
    skipped = _everyone(2, "endings", f"skip, {precision}, {by}")  # max_skips=4, and a good one between
    assert [(rank["attempts"], rank["applied"]) for rank in skipped] == [(7, [0, 2])] * 2
    _said_by_all(skipped, "window 7 is NaN or infinite (4 in a row", names, "step 2")
    assert ("It began on rank 0 in micro-batch 2" in skipped[0]["message"]) == (by == "step")
