"""Thousands of small runs under faults: whole in the end and equal to the undisturbed run, or an error that says what is lost."""

from __future__ import annotations

import errno
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, example, given, seed, settings
from hypothesis import strategies as st

from tests.simulation.cells import At, Attempt, Crashes, Damages, Fails, Plan, Sleeps, Stops, Visited, simulate
from tests.simulation.disk import CHANGES, READS

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
)


def _at(size: int) -> st.SearchStrategy[At]:
    ranks = st.integers(0, size - 1)
    any_call = st.builds(At, number=st.integers(1, 500), rank=ranks)
    change = st.builds(At, number=st.integers(1, 40), kind=st.sampled_from(CHANGES), rank=ranks)
    read = st.builds(At, number=st.integers(1, 60), kind=st.sampled_from(READS), rank=ranks)
    return st.one_of(any_call, change, change, read)


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
    Damages,
    file=st.integers(0, 99),
    how=st.sampled_from(["flip", "flip", "truncate", "delete"]),
    where=st.floats(0, 1),
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


cells = st.one_of(
    _cells(damaged=False, sizes=False),
    _cells(damaged=False, sizes=False),
    _cells(damaged=True, sizes=False),
    _cells(damaged=False, sizes=True),
    _cells(damaged=True, sizes=True),
)
