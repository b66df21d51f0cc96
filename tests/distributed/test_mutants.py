"""The tests can fail: they notice each way of getting the gradient, its scaling or a mode wrong."""

import subprocess
import sys

import pytest

from tests.mutants import Mutant, gradient, modes, read, scaling
from tests.support.commands import ROOT

EVERY = [mutant for file in ("gradient", "scaling", "two_pass", "engines", "modes", "guards") for mutant in read(file)]


@pytest.mark.parametrize("mutant", EVERY, ids=lambda mutant: mutant.name)
def test_what_a_mutant_replaces_is_in_the_package_once(mutant: Mutant) -> None:
    for file, old, new in mutant.edits:
        assert (ROOT / "distaccum" / file).read_text().count(old) == 1, f"bring the mutant up to date: {file}, {old!r}"
        assert old != new


@pytest.mark.heavy
def test_the_tests_beside_the_mutants_of_the_modes_are_there() -> None:
    tests = dict.fromkeys(mutant.where for mutant in modes.MUTANTS)
    collecting = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "", "-p", "no:cacheprovider", *tests]
    found = subprocess.run(collecting, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout[-2000:]


@pytest.mark.heavy
def test_every_mutant_of_the_gradient_is_caught() -> None:
    assert gradient.main() == 0


@pytest.mark.heavy
def test_every_mutant_of_scaling_and_skipping_is_caught() -> None:
    assert scaling.main() == 0


@pytest.mark.heavy
@pytest.mark.timeout(1200)
def test_every_mutant_of_the_modes_is_caught() -> None:
    assert modes.main() == 0
