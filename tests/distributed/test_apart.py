"""Loops in which the ranks go apart, or two accumulators together: exact, or one message on all ranks."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.commands import ROOT, succeed

pytestmark = pytest.mark.slow
WORKER = ROOT / "tests" / "distributed" / "workers" / "apart.py"
EXACT = (
    *(f"abandoned, {where}" for where in ("before", "forward", "inside", "backward")),
    *(f"abandoned at the boundary, {what}" for what in ("before", "forward", "verified", "last", "counted late")),
    "abandoned after the boundary, all",
    *("zipped, first", "zipped, second", "zipped, counted late"),
    *("by parts of acc.module", "by parts of acc.model"),
    *("critic, False", "critic, True"),
)
_APART = "MisuseError: the ranks are not at the same window"
_LEARNED = "SGD is about to step a learned tensor of shape [], which is not in the accumulator's model"
REFUSED = {  # on rank 0, and on rank 1
    "abandoned after the boundary": (_APART, _APART),
    "break": ("PeerError: rank 1: MisuseError: the next window", "MisuseError: the next window before"),
    "continue": ("PeerError: rank 1: MisuseError: the next micro-batch", "MisuseError: the next micro-batch before"),
    "no backward": ("PeerError: rank 1: MisuseError: the end of accumulate()", "call acc.backward() in it"),
    "goes on after an error": ("PeerError: rank 1: MisuseError: the next", "in accumulate(), before its backward()"),
    "leaves and saves": ("PeerError: rank 1: MisuseError: state_dict()", "state_dict() was called on some ranks alone"),
    "leaves and closes": ("PeerError: rank 1: MisuseError: close()", "close() was called on some ranks alone"),
    "leaves for other data": ("rank 1: MisuseError: the ranks have gone apart", "the ranks have gone apart"),
    "edited, state": ("VerificationError: the weights are no longer the same", "in head.bias"),
    "edited, close": ("VerificationError: the weights are no longer the same", "in head.bias"),
    "edited, a run": ("VerificationError: the weights are no longer the same", "in head.bias"),
    "zipped, an empty rank": ("two windows in one zip(), of 1 samples for 2 ranks",) * 2,
    "nested": ("the next window of a loop in which another acc.windows() began",) * 2,
    "carried": ("detach what is carried on",) * 2,
    **{f"learned, {engine}": (_LEARNED, _LEARNED) for engine in ("ddp", "zero1", "fsdp2")},
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    result = tmp_path_factory.mktemp("apart") / "result.json"
    succeed(result, world=2, script=WORKER, timeout=120, PYTHONPATH=str(ROOT))
    return json.loads(result.read_text())


@pytest.mark.parametrize("case", EXACT)
def test_it_is_exact(found: Any, case: str) -> None:
    assert all(isinstance(rank, float) and rank < 3e-6 for rank in found[case]), found[case]


@pytest.mark.parametrize("case", REFUSED)
def test_every_rank_is_told(found: Any, case: str) -> None:
    for said, words in zip(found[case], REFUSED[case], strict=True):
        assert words in str(said), found[case]


def test_a_rank_that_closes_while_it_handles_an_error_waits_for_nobody(found: Any) -> None:
    assert found["edited, error"] == [None, None]
