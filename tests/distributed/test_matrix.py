"""The promise, cell by cell: whatever the world, micro-batch, data, level, loss and number format."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from tests.support.answers import answer
from tests.support.matrix import AXES, TOLERANCE, Cell, covering_set, every_cell


def _errors(cells: list[Cell], timeout: float) -> dict[Cell, float]:
    errors: dict[Cell, float] = {}
    for world in AXES["world"]:
        chosen = [cell for cell in cells if cell.world == world]
        found = answer("matrix", asked=[asdict(cell) for cell in chosen], world=world, timeout=timeout)
        errors |= zip(chosen, found, strict=True)
    return errors


def _wrong(errors: dict[Cell, float]) -> dict[Cell, float]:
    """The cells that are too far off; prints how far the others are."""
    for dtype, tolerance in TOLERANCE.items():
        largest = max(error for cell, error in errors.items() if cell.dtype == dtype)
        print(
            f"{dtype}: {sum(cell.dtype == dtype for cell in errors)} cells, largest error {largest:.1e} <= {tolerance}"
        )
    return {cell: error for cell, error in errors.items() if not error <= TOLERANCE[cell.dtype]}


def test_a_covering_set_of_cells() -> None:
    assert not _wrong(_errors(covering_set(), timeout=240))


@pytest.mark.heavy
@pytest.mark.timeout(1200)
def test_every_cell() -> None:
    cells = every_cell()
    assert len(cells) == 1440
    assert not _wrong(_errors(cells, timeout=600))
