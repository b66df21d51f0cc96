"""Breaks the two passes of a window on purpose, one way at a time, and shows that the tests notice.

``python -m tests.mutants.two_pass`` prints each mutant's largest error; it exits with 1 if one of them is not caught.
"""

import sys

from tests.distributed.workers.two_pass import Cell
from tests.mutants.gradient import Mutant, survivors
from tests.support.commands import ROOT

WORKER = ROOT / "tests" / "distributed" / "workers" / "two_pass.py"
CELLS = [
    Cell(engine="ddp", micro_size=2),
    Cell(engine="ddp", loss="balanced", verify="never"),
    Cell(engine="fsdp2", micro_size=1, size=27, verify="never"),  # a rank has a micro-batch more
    Cell(engine="ddp", micro_size=2, dropout=0.5),
]
_PASSES, _GATHER = "accumulation/two_pass.py", "accumulation/two_pass.py"

MUTANTS = (
    Mutant(
        "negatives of this rank alone",
        (
            (
                _GATHER,
                "for rank, each in enumerate(everyone) for i",
                "for rank, each in enumerate(everyone) if rank == world.rank for i",
            ),
        ),
    ),
    Mutant(
        "the gradient of another rank's rows",
        (
            (_GATHER, "if rank == world.rank:\n", "if rank == world.size - 1 - world.rank:\n"),
            (_GATHER, "spans[i].append(", "spans[min(i, len(spans) - 1)].append("),
        ),
    ),
    Mutant("the gradient of another micro-batch", ((_PASSES, "part = self._parts[i]", "part = self._parts[i - 1]"),)),
    Mutant("other random numbers in the second pass", ((_PASSES, "part.state.restore()\n", "torch.rand(1)\n"),)),
    Mutant(
        "the gradient of one loss is that of the other",
        (
            (
                _PASSES,
                "in part.gradients.items()}",
                "in zip(self.sums, list(part.gradients.values())[::-1], strict=True)}",
            ),
        ),
    ),
    Mutant(
        "every rank reports the whole loss",
        ((_PASSES, "total if world.is_main else torch.zeros_like(total)", "total"),),
    ),
    Mutant(
        "ranks with fewer micro-batches run none for nothing",
        ((_PASSES, "return [batch] * (most - len(own))", "return []"),),
    ),
)


def main() -> int:
    """Tries the mutants; returns how many were not caught."""
    return survivors(MUTANTS, WORKER, CELLS, 1e-12)


if __name__ == "__main__":
    sys.exit(main() > 0)
