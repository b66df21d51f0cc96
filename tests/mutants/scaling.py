"""Breaks loss scaling and skipping on purpose, one way at a time, and shows that arithmetic by hand notices.

``python -m tests.mutants.scaling`` prints each mutant's largest error; it exits with 1 if one of them is not caught.
"""

import sys

from tests.distributed.workers.engine_overflow import CASES
from tests.mutants import read
from tests.mutants.gradient import survivors

MUTANTS = read("scaling")
TOLERANCE = 1e-6  # of fp32 weights; without a mutant it is their last digit


def main() -> int:
    """Of scaling and skipping."""
    return survivors(MUTANTS, "engine_overflow", CASES[:1], TOLERANCE)


if __name__ == "__main__":
    sys.exit(main() > 0)
