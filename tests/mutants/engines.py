"""Breaks each engine's arithmetic on purpose, one way at a time, and shows that the engine matrix notices.

``python -m tests.mutants.engines`` prints each mutant's largest error; 1: one is not caught.
"""

import sys

from tests.mutants import read
from tests.mutants.gradient import largest_error
from tests.support.engine_matrix import ENGINES, Cell

MUTANTS = read("engines")  # each with the engine and the number format to look at it in


def main() -> int:
    """How many mutants are not caught."""
    wrong = 0
    for mutant in MUTANTS:
        engine, precision = mutant.where.split(", ")
        if engine not in ENGINES:
            continue  # an optional extra
        cells = [Cell(engine, 2, precision, "unequal", "sgd")]  # two windows, of unequal lengths; the second is ragged
        error = largest_error(mutant, "engine_matrix", cells)
        caught = not error <= cells[0].tolerance
        wrong += not caught
        print(f"{mutant.name:<55} {precision} error {error:8.1e}  {'caught' if caught else 'NOT CAUGHT'}")
    return wrong


if __name__ == "__main__":
    sys.exit(main() > 0)
