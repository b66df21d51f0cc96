"""The oracle matrix can fail: it notices each way of getting the gradient wrong."""

from __future__ import annotations

from tests import mutants


def test_every_mutant_is_caught() -> None:
    assert mutants.main() == 0
