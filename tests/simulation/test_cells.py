"""Thousands of small runs under faults: in the end equal to the undisturbed run, or an error that says what is lost."""

import errno
from collections import Counter
from time import monotonic
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from tests.simulation.cells import At, Attempt, Crashes, Damages, Fails, Plan, Sleeps, Stops, Visited, simulate
from tests.simulation.disk import CHANGES, READS

# A process that dies closes no file.
pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
ERRORS = (errno.EIO, errno.ESTALE, errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EINTR)


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


plans = st.builds(
    Plan,
    steps=st.integers(4, 9),
    save_every=st.integers(1, 5),
    keep=st.integers(0, 3),
    log_every=st.integers(1, 3),
    micro=st.sampled_from([2, 4, 8]),
    data=st.sampled_from(["samples", "samples", "tokens", "stream"]),
    engine=st.sampled_from(["ddp", "ddp", "zero1"]),
    best=st.booleans(),
    background=st.booleans(),
    pace=st.sampled_from([0, 1, 3, 100]),
)


def _at(size: int) -> st.SearchStrategy[At]:
    ranks = st.integers(0, size - 1)
    any_call = st.builds(At, number=st.integers(1, 500), rank=ranks)
    change = st.builds(At, number=st.integers(1, 40), kind=st.sampled_from(CHANGES), rank=ranks)
    read = st.builds(At, number=st.integers(1, 60), kind=st.sampled_from(READS), rank=ranks)
    saving = st.builds(
        At, number=st.integers(1, 60), kind=st.sampled_from(CHANGES), rank=ranks, path=st.just("/.saving-")
    )
    return st.one_of(any_call, change, change, read, saving)


def _faults(size: int) -> st.SearchStrategy[Any]:
    at = _at(size)
    kinds = [
        st.builds(Fails, at=at, error=st.sampled_from(ERRORS), times=st.sampled_from([1, 2, 6])),
        st.builds(Crashes, at=at, after=st.booleans(), share=st.floats(0, 1)),
        st.builds(Crashes, at=at, after=st.booleans(), share=st.floats(0, 1), power=st.integers(0, 999)),
        st.builds(Stops, at=at),
    ]
    if size == 1:
        kinds += [st.builds(Visited, at=at), st.builds(Sleeps, at=at)]
    return st.one_of(kinds)


damages = st.builds(
    Damages, file=st.integers(0, 99), how=st.sampled_from(["flip", "flip", "truncate", "delete"]), where=st.floats(0, 1)
)


def _attempts(sizes: st.SearchStrategy[int], *, damaged: bool) -> st.SearchStrategy[list[Attempt]]:
    def of(size: int) -> st.SearchStrategy[Attempt]:
        return st.builds(
            Attempt,
            faults=st.lists(_faults(size), min_size=1, max_size=2).map(tuple),
            size=st.just(size),
            damages=st.lists(damages, max_size=2 if damaged else 0).map(tuple),
        )

    return st.lists(sizes.flatmap(of), min_size=1, max_size=3)


def _cells(*, damaged: bool, sizes: bool) -> st.SearchStrategy[tuple[Plan, list[Attempt]]]:
    def of(plan: Plan) -> st.SearchStrategy[tuple[Plan, list[Attempt]]]:
        size = st.sampled_from([1, 2, 3]) if sizes and plan.data != "stream" else st.just(1)
        return st.tuples(st.just(plan), _attempts(size, damaged=damaged))

    return plans.flatmap(of)


def _cells_of(*, sizes: bool) -> st.SearchStrategy[tuple[Plan, list[Attempt]]]:
    whole, damaged = _cells(damaged=False, sizes=sizes), _cells(damaged=True, sizes=sizes)
    return st.one_of(whole, whole, damaged)


cells = st.one_of(_cells_of(sizes=False), _cells_of(sizes=False), _cells_of(sizes=True))

SMALL = Plan(steps=4, save_every=2, keep=1)


def _saved(*damages: Damages) -> Attempt:
    """Killed after its first checkpoint, with damage after that."""
    return Attempt(faults=(Crashes(at=At(number=2, kind="rename", path="history.json"), after=True),), damages=damages)


def _power(number: int, path: str, power: int) -> Attempt:
    at = At(number=number, kind="rename", path=path)
    return Attempt(faults=(Crashes(at=at, after=True, power=power),))


# What the simulation has found, as small as it gets; each was seen to fail.
FOUND: dict[str, tuple[Plan, list[Attempt]]] = {
    "a machine that goes down keeps the records of what it has saved": (SMALL, [_power(2, "history.json", 11)]),
    "a run that goes down while it rewinds keeps its records": (
        SMALL,
        [
            Attempt(faults=(Crashes(at=At(number=5, kind="rename", path="status.json"), after=True),)),
            _power(1, "metrics.jsonl", 0),
            _power(1, "metrics.jsonl", 4),
            _power(1, "metrics.jsonl", 2),
        ],
    ),
    "half a checkpoint that was being removed is none": (
        SMALL,
        [Attempt(faults=(Crashes(at=At(number=2, kind="unlink", path="step-2")),))],
    ),
    "the mark of shared storage goes": (
        SMALL,
        [Attempt(faults=(Crashes(at=At(number=1, kind="unlink", path=".shared-")),), size=2)],
    ),
    "what could not be renamed goes": (
        SMALL,
        [Attempt(faults=(Fails(at=At(number=1, kind="rename", path="latest"), times=6),))],
    ),
    "a process that slept while another ran writes no record": (
        SMALL,
        [Attempt(faults=(Sleeps(at=At(number=2, kind="stat", path=".failure")),))],
    ),
    "a process that slept before it rewinds moves no record of another": (
        Plan(steps=5, save_every=1, keep=1, log_every=3),
        [Attempt(faults=(Sleeps(at=At(number=6, kind="create")),))],
    ),
    "a process that slept while it read the records moves none of another": (
        Plan(steps=4, save_every=1, keep=0, micro=2),
        [Attempt(faults=(Crashes(at=At(number=31)),)), Attempt(faults=(Sleeps(at=At(number=20, kind="open")),))],
    ),
    "lost records are told": (SMALL, [_saved(Damages(name="metrics.jsonl", how="delete"))]),
    "a damaged history is none": (
        SMALL,
        [
            _saved(
                Damages(name="history.json", where=0.03),
                Damages(name="checkpoints", how="lose"),
                Damages(name="metrics.jsonl", how="delete"),
            )
        ],
    ),
    "a history with a flipped key is none": (
        SMALL,
        [_saved(Damages(name="history.json", where=0.85), Damages(name="checkpoints", how="lose"))],
    ),
    "a history that cannot be read is not written anew": (
        SMALL,
        [
            _saved(Damages(name="checkpoints", how="lose"), Damages(name="metrics", how="lose")),
            Attempt(
                faults=(
                    Fails(at=At(number=1, kind="open", path="history.json"), times=99),
                    Crashes(at=At(number=1, kind="create", path="plan.json")),
                )
            ),
        ],
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_stays_mended(name: str) -> None:
    simulate(*FOUND[name])


QUIET = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example)


@pytest.mark.slow
@settings(max_examples=12, derandomize=True, database=None, print_blob=True, suppress_health_check=QUIET)
@given(cells)
def test_runs_are_whole_or_say_what_is_lost(cell: tuple[Plan, list[Attempt]]) -> None:
    simulate(*cell)


@pytest.mark.heavy
@seed(14)
@settings(max_examples=150, database=None, print_blob=True, suppress_health_check=QUIET)
@given(cells)
def test_a_hundred_more(cell: tuple[Plan, list[Attempt]]) -> None:
    simulate(*cell)


@pytest.mark.heavy
@pytest.mark.timeout(3600)
def test_thousands_of_cells() -> None:
    counts: Counter[str] = Counter()

    @seed(15)
    @settings(max_examples=3000, database=None, print_blob=True, suppress_health_check=QUIET)
    @given(cells)
    def run(cell: tuple[Plan, list[Attempt]]) -> None:
        ended = simulate(*cell)
        counts[ended] += 1
        counts.update(type(fault).__name__ for attempt in cell[1] for fault in (*attempt.faults, *attempt.damages))
        counts["attempts"] += len(cell[1]) + 1

    began = monotonic()
    run()
    number = counts["done"] + counts["refused"]
    print(f"{number} cells in {monotonic() - began:.0f} s: {dict(counts)}")
    assert number >= 3000
