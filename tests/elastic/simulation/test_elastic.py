"""Random elastic runs hold, and runs that are broken on purpose do not: see tests/elastic/simulation/runs.py."""

import pytest

from tests.elastic.simulation.runs import run
from tests.support.elastic_model import BrokenError
from tests.support.elastic_mutants import MUTANTS


def test_random_runs_hold() -> None:
    seen = run(1000, seed=0)
    print(dict(seen))
    assert seen["done"] > 500
    assert min(seen[what] for what in ("dies", "comes", "slips", "expels", "lie", "too few", "all gone")) > 20


@pytest.mark.heavy
@pytest.mark.timeout(3600)
def test_a_hundred_thousand_random_runs_hold() -> None:
    print(dict(run(100_000, seed=0)))


# Needs a newcomer that sleeps through its only view, and then one death of two; not in 10,000 cells, but in the search.
RARE = {"a newcomer looks at the newest view only"}


@pytest.mark.heavy
@pytest.mark.parametrize("name", sorted(MUTANTS.keys() - RARE))
def test_what_is_broken_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = MUTANTS[name]
    mutant.apply(monkeypatch)
    with pytest.raises(BrokenError):
        run(10_000, seed=0, rules=mutant.rules)
