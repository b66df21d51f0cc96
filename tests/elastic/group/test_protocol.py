"""All states of small elastic runs: see tests/support/elastic_model.py."""

from __future__ import annotations

import pytest

from tests.support.elastic_model import Bounds, BrokenError, Found, Model, search
from tests.support.elastic_mutants import MUTANTS


def _search(bounds: Bounds, *, circles: bool = True) -> Found:
    found = search(Model(bounds), circles=circles)
    print(f"{bounds}: {found}")
    assert found.lasts["done"]
    return found


@pytest.mark.parametrize(
    "bounds",
    [
        Bounds(deaths=2, newcomers=1),
        Bounds(deaths=1, newcomers=1, least=2, stages=True),
        Bounds(deaths=1, slips=1, expulsions=1),
        Bounds(deaths=1, lies=1, stages=True),
        Bounds(deaths=2, newcomers=1, expulsions=1, windows=1, blocks=2),
        Bounds(members=3, deaths=3, stages=True),
        Bounds(members=3, deaths=2, windows=3, blocks=4),
        Bounds(members=3, deaths=1, newcomers=1, windows=1, blocks=3),
        Bounds(members=3, deaths=1, expulsions=1, windows=1, blocks=2),
    ],
    ids=str,
)
def test_all_states_of_a_small_run_hold(bounds: Bounds) -> None:
    _search(bounds)


@pytest.mark.heavy
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "bounds",
    [
        Bounds(members=4, deaths=3),
        Bounds(members=3, deaths=3, newcomers=1),
        Bounds(members=3, deaths=1, slips=1, expulsions=1),
        Bounds(members=3, deaths=1, newcomers=1, blocks=4),
        Bounds(members=3, deaths=1, lies=1),
        Bounds(members=2, deaths=2, newcomers=1, slips=1, expulsions=1, windows=1, blocks=2),
        Bounds(members=2, deaths=2, newcomers=1, lies=1, windows=1, blocks=2),
        Bounds(members=2, deaths=3, newcomers=1, windows=3, blocks=4, stages=True),
    ],
    ids=str,
)
def test_all_states_of_a_larger_run_hold(bounds: Bounds) -> None:
    _search(bounds, circles=False)


def test_without_faults_every_run_is_done() -> None:
    assert set(_search(Bounds(members=3, deaths=0)).lasts) == {"done"}


def test_a_run_ends_as_long_as_one_member_lives() -> None:
    assert set(_search(Bounds(members=3, deaths=2)).lasts) == {"done"}


def test_too_few_go_on_with_nothing() -> None:
    assert set(_search(Bounds(members=2, deaths=1, least=2)).lasts) == {"done", "too few"}


@pytest.mark.parametrize("name", MUTANTS)
def test_what_is_broken_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = MUTANTS[name]
    mutant.apply(monkeypatch)
    with pytest.raises(BrokenError, match=mutant.said) as raised:
        search(Model(mutant.bounds, mutant.rules))
    print(raised.value)
