"""Breaks the arithmetic on purpose, one way at a time, and shows that the oracle matrix notices.

``python -m tests.mutants.gradient`` prints each mutant's largest error; it exits with 1 if one of them is not caught.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import asdict

from tests.mutants import Mutant, answered, read
from tests.support.matrix import TOLERANCE, Cell

MUTANTS = read("gradient")
# Two ranks, every level, every loss; windows that are ragged, of unequal lengths, with more than one micro-step.
CELLS = [
    Cell(world=2, micro=3, data="unequal", level=level, loss=loss, dtype="float64")
    for level, loss in ((1, "tokens"), (2, "two"), (3, "weighted"))
]


def largest_error(mutant: Mutant | None, worker: str, cells: Sequence[Cell]) -> float:
    """The error that ``worker`` finds with a mutated copy of the package on its path; infinite if it failed."""
    errors = answered([mutant], worker, [asdict(cell) for cell in cells])
    if isinstance(errors, str):
        print(errors)
        return math.inf
    return float(max(errors))


def survivors(mutants: Sequence[Mutant], worker: str, cells: Sequence[Cell], tolerance: float) -> int:
    """Prints one line per mutant; returns how many were not caught, plus one if the package itself was."""
    found = 0
    for mutant in (None, *mutants):
        error = largest_error(mutant, worker, cells)
        caught = not error <= tolerance
        found += caught if mutant is None else not caught
        verdict = "exact" if not caught else "caught"
        print(f"{mutant.name if mutant else 'no mutant':<55} error {error:8.1e}  {verdict}")
    return found


def main() -> int:
    """Tries the mutants of the gradient's arithmetic; returns how many were not caught."""
    return survivors(MUTANTS, "matrix", CELLS, TOLERANCE["float64"])


if __name__ == "__main__":
    sys.exit(main() > 0)
