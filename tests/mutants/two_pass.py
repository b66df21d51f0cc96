"""Breaks the two passes of a window on purpose, one way at a time, and shows that the tests notice.

``python -m tests.mutants.two_pass`` prints each mutant's largest error; it exits with 1 if one of them is not caught.
"""

import sys

from tests.distributed.workers.two_pass import Cell
from tests.mutants import read
from tests.mutants.gradient import survivors

MUTANTS = read("two_pass")
CELLS = [
    Cell(engine="ddp", micro_size=2),
    Cell(engine="ddp", loss="balanced", verify="never"),
    Cell(engine="fsdp2", micro_size=1, size=27, verify="never"),  # a rank has a micro-batch more
    Cell(engine="ddp", micro_size=2, dropout=0.5),
]


def main() -> int:
    """Tries the mutants; returns how many were not caught."""
    return survivors(MUTANTS, "two_pass", CELLS, 1e-12)


if __name__ == "__main__":
    sys.exit(main() > 0)
