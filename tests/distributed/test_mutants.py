"""The tests can fail: they notice each way of getting the gradient, its scaling or a mode wrong."""

import subprocess
import sys

import pytest

from tests.mutants import engines as engine_mutants
from tests.mutants import gradient as mutants
from tests.mutants import modes as mode_mutants
from tests.mutants import scaling as scaling_mutants
from tests.mutants import two_pass as two_pass_mutants
from tests.mutants.gradient import Mutant
from tests.support.commands import ROOT

EVERY = [
    *(*mutants.MUTANTS, *scaling_mutants.MUTANTS, *two_pass_mutants.MUTANTS),
    *(mutant for _, _, mutant in engine_mutants.MUTANTS),
    *(mutant for _, mutant in mode_mutants.MUTANTS),
]


@pytest.mark.parametrize("mutant", EVERY, ids=lambda mutant: mutant.name)
def test_what_a_mutant_replaces_is_in_the_package_once(mutant: Mutant) -> None:
    for file, old, new in mutant.edits:
        assert (ROOT / "distaccum" / file).read_text().count(old) == 1, f"bring the mutant up to date: {file}, {old!r}"
        assert old != new


@pytest.mark.heavy
def test_the_tests_beside_the_mutants_of_the_modes_are_there() -> None:
    tests = dict.fromkeys(test for test, _ in mode_mutants.MUTANTS)
    collecting = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "", "-p", "no:cacheprovider", *tests]
    found = subprocess.run(collecting, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout[-2000:]


@pytest.mark.heavy
def test_every_mutant_of_the_gradient_is_caught() -> None:
    assert mutants.main() == 0


@pytest.mark.heavy
def test_every_mutant_of_scaling_and_skipping_is_caught() -> None:
    assert scaling_mutants.main() == 0


@pytest.mark.heavy
@pytest.mark.timeout(1200)
def test_every_mutant_of_the_modes_is_caught() -> None:
    assert mode_mutants.main() == 0
