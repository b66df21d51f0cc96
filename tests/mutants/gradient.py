"""Breaks the arithmetic on purpose, one way at a time, and shows that the oracle matrix notices.

``python -m tests.mutants.gradient`` prints each mutant's largest error; it exits with 1 if one of them is not caught.
"""

import json
import math
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.support.commands import ROOT, run
from tests.support.matrix import TOLERANCE, Cell

WORKER = ROOT / "tests" / "distributed" / "workers" / "matrix.py"
# Two ranks, every level, every loss; windows that are ragged, of unequal lengths, with more than one micro-step.
CELLS = [
    Cell(world=2, micro=3, data="unequal", level=level, loss=loss, dtype="float64")
    for level, loss in ((1, "tokens"), (2, "two"), (3, "weighted"))
]


@dataclass(frozen=True)
class Mutant:
    """Edits ``(file, old, new)`` of the package's files; each ``old`` must occur once in its file."""

    name: str
    edits: tuple[tuple[str, str, str], ...]


def one(name: str, file: str, old: str, new: str) -> Mutant:
    """That edits one place."""
    return Mutant(name, ((file, old, new),))


MUTANTS = (
    Mutant(
        "mean of means",
        (
            (
                "accumulation/step.py",
                "normalize_loss(total, window.counts,",
                (
                    "normalize_loss(total, {n: c * len(window.micro_batches) * engine.gradient_divide_factor"
                    " for n, c in own.items()},"
                ),
            ),
            (
                "accumulation/open_window.py",
                "counts = self._known_counts(count) if known else self._provisional_counts(count)",
                (
                    "counts = {n: c * len(self) * self._engine.gradient_divide_factor"
                    " for n, c in self._current.counts.items()}"
                ),
            ),
        ),
    ),
    one(
        "division by the planned instead of the actual count",
        "data/loader.py",
        "counts, _ = counter.all_reduce(micro_batches, error=error)",
        (
            "counts, _ = counter.all_reduce(micro_batches, error=error)\n"
            "            counts = {n: c * len(cut.window(0)) / len(cut.window(k)) for n, c in counts.items()}"
        ),
    ),
    one(
        "the engine's averaging forgotten",
        "engines/ddp/engine.py",
        "gradient_divide_factor=1,",
        "gradient_divide_factor=world.size,",
    ),
    Mutant(
        "sync on a wrong micro-step",
        (
            ("accumulation/step.py", "sync=i == last", "sync=i == 0"),
            ("accumulation/open_window.py", "sync=self._left == 1", "sync=self._left == len(self)"),
        ),
    ),
    one(
        "a leaked tail",
        "engines/ddp/engine.py",
        "        self.zero_gradients()\n        return output",
        "        return output",
    ),
)


def largest_error(mutant: Mutant | None, worker: Path, cells: Sequence[Cell], folder: Path) -> float:
    """The error that ``worker`` finds with a mutated copy of the package on its path; infinite if it failed."""
    copy = folder / "distaccum"
    shutil.copytree(ROOT / "distaccum", copy, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "conf").symlink_to(ROOT / "conf")
    (folder / "tests").symlink_to(ROOT / "tests")
    for file, old, new in mutant.edits if mutant else ():
        text = (copy / file).read_text()
        assert text.count(old) == 1, f"{file} no longer says {old!r} once: bring the mutant up to date"
        (copy / file).write_text(text.replace(old, new))
    asked, answered = folder / "cells.json", folder / "errors.json"
    asked.write_text(json.dumps([asdict(cell) for cell in cells]))
    finished = run(answered, asked, world=2, script=worker, warm="torch", PYTHONPATH=str(folder), timeout=120)
    if finished.returncode:
        print(finished.stderr)
        return math.inf
    return float(max(json.loads(answered.read_text())))


def survivors(mutants: Sequence[Mutant], worker: Path, cells: Sequence[Cell], tolerance: float) -> int:
    """Prints one line per mutant; returns how many were not caught, plus one if the package itself was."""
    found = 0
    for mutant in (None, *mutants):
        with tempfile.TemporaryDirectory() as folder:
            error = largest_error(mutant, worker, cells, Path(folder))
        caught = not error <= tolerance
        found += caught if mutant is None else not caught
        verdict = "exact" if not caught else "caught"
        print(f"{mutant.name if mutant else 'no mutant':<55} error {error:8.1e}  {verdict}")
    return found


def main() -> int:
    """Tries the mutants of the gradient's arithmetic; returns how many were not caught."""
    return survivors(MUTANTS, WORKER, CELLS, TOLERANCE["float64"])


if __name__ == "__main__":
    sys.exit(main() > 0)
