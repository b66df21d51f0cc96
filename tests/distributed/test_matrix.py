"""The promise, cell by cell: whatever the world, micro-batch, data, level, loss and number format."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.support.commands import ROOT, succeed
from tests.support.matrix import AXES, TOLERANCE, Cell, covering_set, every_cell

WORKER = Path(__file__).parent / "workers" / "matrix.py"


def _errors(folder: Path, cells: list[Cell], timeout: float) -> dict[Cell, float]:
    errors: dict[Cell, float] = {}
    for world in AXES["world"]:
        chosen = [cell for cell in cells if cell.world == world]
        asked, answered = folder / f"cells-{world}.json", folder / f"errors-{world}.json"
        asked.write_text(json.dumps([asdict(cell) for cell in chosen]))
        succeed(answered, asked, world=world, script=WORKER, timeout=timeout, PYTHONPATH=str(ROOT))
        errors |= zip(chosen, json.loads(answered.read_text()), strict=True)
    return errors


def _wrong(errors: dict[Cell, float]) -> dict[Cell, float]:
    """The cells that are too far off; prints how far the others are."""
    for dtype, tolerance in TOLERANCE.items():
        largest = max(error for cell, error in errors.items() if cell.dtype == dtype)
        print(
            f"{dtype}: {sum(cell.dtype == dtype for cell in errors)} cells, largest error {largest:.1e} <= {tolerance}"
        )
    return {cell: error for cell, error in errors.items() if not error <= TOLERANCE[cell.dtype]}


def test_a_covering_set_of_cells(tmp_path: Path) -> None:
    assert not _wrong(_errors(tmp_path, covering_set(), timeout=240))


@pytest.mark.heavy
@pytest.mark.timeout(1200)
def test_every_cell(tmp_path: Path) -> None:
    cells = every_cell()
    assert len(cells) == 1440
    assert not _wrong(_errors(tmp_path, cells, timeout=600))
