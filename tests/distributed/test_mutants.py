"""The tests can fail: they notice each way of getting the gradient, or its scaling, wrong."""

from __future__ import annotations

import pytest

from tests.mutants import gradient as mutants
from tests.mutants import scaling as scaling_mutants

pytestmark = pytest.mark.heavy


def test_every_mutant_of_the_gradient_is_caught() -> None:
    assert mutants.main() == 0


def test_every_mutant_of_scaling_and_skipping_is_caught() -> None:
    assert scaling_mutants.main() == 0
