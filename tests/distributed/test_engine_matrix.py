"""The same step on every engine: whatever the world, the number format, the data and the optimizer."""

from collections.abc import Sequence
from dataclasses import asdict

import pytest

from tests.mutants import engines as engine_mutants
from tests.support.answers import answer
from tests.support.engine_matrix import (
    AXES,
    ENGINES,
    OF_EACH_KIND,
    OF_MODES,
    PRECISIONS,
    WORLDS,
    Cell,
    cells_of_modes,
    covering_set,
    every_cell,
    is_refused,
)


def _errors(cells: Sequence[Cell], world: int, timeout: float, warm: str = "deepspeed") -> dict[Cell, float]:
    # Those of stage 3 last: it puts a linear layer of its own in the place of torch's, for the whole process.
    chosen = sorted((cell for cell in cells if cell.world == world), key=lambda cell: cell.engine == "deepspeed 3")
    asked = [asdict(cell) for cell in chosen]
    return dict(zip(chosen, answer("engine_matrix", asked=asked, world=world, timeout=timeout, warm=warm), strict=True))


def _wrong(errors: dict[Cell, float]) -> dict[Cell, float]:
    """The cells that are too far off; prints the largest error of each engine, precision and optimizer."""
    columns = [(precision, update) for precision in PRECISIONS for update in AXES["update"]]
    print("".join([f"{'':16}", *(f"{f'{precision} {update}':>12}" for precision, update in columns)]))
    for engine in ENGINES:
        largest = []
        for column in columns:
            found = [e for cell, e in errors.items() if (cell.engine, cell.precision, cell.update) == (engine, *column)]
            largest.append(f"{max(found):12.1e}" if found else f"{'':12}")
        print(f"{engine:16}{''.join(largest)}")
    return {cell: error for cell, error in errors.items() if not error <= cell.tolerance}


@pytest.mark.parametrize("warm", ["distaccum", pytest.param("deepspeed", marks=pytest.mark.slow)])
def test_a_covering_set_of_cells(warm: str) -> None:
    """In two parts: those of DeepSpeed, and the others. What is as exact as fp32 did not compute in 16 bits."""
    cells = [cell for cell in covering_set() if cell.engine.startswith("deepspeed") == (warm == "deepspeed")]
    errors = _errors(cells, 2, timeout=150, warm=warm)
    assert not _wrong(errors)
    assert min(error for cell, error in errors.items() if cell.precision != "fp32") > 1e-5


@pytest.mark.heavy
@pytest.mark.timeout(2400)
def test_every_cell() -> None:
    cells = every_cell()
    masters = [engine for engine in ENGINES if not engine.startswith("deepspeed")]
    assert len(cells) == (len(ENGINES) * 3 + len(masters)) * 3 * 3 * 2
    errors: dict[Cell, float] = {}
    for world in WORLDS:
        errors |= _errors(cells, world, timeout=1200)
    assert not _wrong(errors)


@pytest.mark.slow
def test_a_covering_set_of_modes() -> None:
    """On an engine of each kind; the others' cells are heavy."""
    axes = OF_MODES | {"engine": OF_EACH_KIND}
    errors = _errors(covering_set(axes, is_refused, precision="fp32"), 2, timeout=150)
    assert not {cell: error for cell, error in errors.items() if not error <= cell.tolerance}


@pytest.mark.heavy
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("world", WORLDS)
def test_every_cell_of_modes(world: int) -> None:
    errors = _errors(cells_of_modes(world), world, timeout=1100)
    for mode in OF_MODES["mode"]:
        print(mode, max(error for cell, error in errors.items() if cell.mode == mode))
    assert not {cell: error for cell, error in errors.items() if not error <= cell.tolerance}


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_every_mutant_is_caught() -> None:
    assert engine_mutants.main() == 0
