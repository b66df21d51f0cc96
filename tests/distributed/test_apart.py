"""Ranks that go apart, have less than others, or two accumulators at once: exact, or one message on all ranks."""

from typing import Any

import pytest

from tests.support.answers import answer

pytestmark = pytest.mark.slow
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
    "no backward": ("PeerError: rank 1: MisuseError: the end of accumulate()", "call acc.backward(loss) in it"),
    "goes on after an error": ("PeerError: rank 1: MisuseError: the next", "in accumulate(), before its backward()"),
    "leaves and saves": ("PeerError: rank 1: MisuseError: state_dict()", "state_dict() was called on some ranks alone"),
    "resumes alone": ("the ranks have gone apart", "call it on every rank, as in `value = acc.resume()` before"),
    "leaves and resumes": ("PeerError: rank 1: MisuseError: resume()", "resume() was called on some ranks alone"),
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
def found() -> Any:
    return answer("apart", timeout=120)


@pytest.mark.parametrize("case", EXACT)
def test_it_is_exact(found: Any, case: str) -> None:
    assert all(isinstance(rank, float) and rank < 3e-6 for rank in found[case]), found[case]


@pytest.mark.parametrize("case", REFUSED)
def test_every_rank_is_told(found: Any, case: str) -> None:
    for said, words in zip(found[case], REFUSED[case], strict=True):
        assert words in str(said), found[case]


def test_a_rank_that_closes_while_it_handles_an_error_waits_for_nobody(found: Any) -> None:
    assert found["edited, error"] == [None, None]


@pytest.fixture(scope="module")
def paced() -> Any:
    return answer("uneven_inputs", timeout=120)


@pytest.mark.heavy
@pytest.mark.parametrize("sync", ["boundary", "every"])
def test_a_rank_that_keeps_pace_adds_nothing(sync: str) -> None:
    """Beside a spoiled sample; other programs of uneven ranks are in ``test_fsdp2_programs.py``."""
    found = answer("uneven_inputs", "spoiled", timeout=120)
    expected, steps = found["ddp"], found[sync]
    assert [applied for applied, _ in steps] == [applied for applied, _ in expected]
    assert [norm for applied, norm in steps if applied] == pytest.approx(
        [norm for applied, norm in expected if applied], rel=1e-5
    )
    assert not all(applied for applied, _ in steps)


@pytest.mark.parametrize("engine", ["ddp", "boundary", "every"])
def test_random_numbers_of_a_resumed_run_are_those_of_an_uninterrupted_one(paced: Any, engine: str) -> None:
    uninterrupted, resumed = paced[engine]["resumed"]
    assert len(uninterrupted) >= 2
    assert resumed == uninterrupted


@pytest.mark.parametrize("engine", ["ddp", "boundary", "every"])
def test_saved_statistics_are_those_of_one_rank(paced: Any, engine: str) -> None:
    for saved, own in paced[engine]["buffers"].values():
        assert saved == own


@pytest.mark.parametrize("engine", ["ddp", "boundary", "every", "zero1"])
def test_what_an_optimizer_counts_in_its_groups_goes_on(paced: Any, engine: str) -> None:
    assert paced[engine]["counted"] == [2, 0.5]


def test_a_forward_on_one_rank_between_windows_is_refused_on_all(paced: Any) -> None:
    assert "a forward of acc.model was called on some ranks alone" in paced["boundary"]["alone"]
