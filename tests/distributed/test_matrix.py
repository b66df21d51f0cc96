"""The promise, cell by cell: whatever the world, micro-batch, data, level, loss and number format."""

from dataclasses import asdict, dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.support import oracle
from tests.support.answers import answer
from tests.support.commands import QUIET, TINY, metrics, succeed
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


STEPS = 8
# 145 samples of 16 bytes: a window of 48 or of 50 leaves a ragged last one, and 8 windows see two epochs end.
TEXT = "The quick brown fox jumps over the lazy dog, again and again; " * 44
SIZES = {1: (48, 7), 2: (6, 5), 3: (4,), 4: (12,)}  # micro-batch sizes for each world size
OPTIMIZERS = ("sgd", "adamw")
RELATIVE = 1e-5  # relative, fp32


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path


@dataclass(frozen=True)
class Factorization:
    """One factorization of one training run."""

    world: int
    micro_batch_size: int
    global_batch_size: int
    optimizer: str
    run_dir: Path


@pytest.fixture(
    scope="module", params=[pytest.param(50, marks=pytest.mark.slow), pytest.param(48, marks=pytest.mark.heavy)]
)
def cells(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, text: Path) -> list[Factorization]:
    """Every cell of a global batch, run: one Hydra sweep for each world size."""
    global_batch_size, cells = request.param, []
    for world, sizes in SIZES.items():
        sweep = tmp_path_factory.mktemp(f"world-{world}")
        succeed(
            "-m",
            "data=text",
            f"data.path={text}",
            *TINY,
            *QUIET,
            f"trainer.max_steps={STEPS}",
            f"batch.global_size={global_batch_size}",
            f"optim={','.join(OPTIMIZERS)}",
            f"batch.micro_size={','.join(map(str, sizes))}",
            f"hydra.sweep.dir={sweep}",
            world=world,
        )
        cells += [
            Factorization(
                world=world,
                micro_batch_size=micro,
                global_batch_size=global_batch_size,
                optimizer=optimizer,
                run_dir=sweep / str(number),
            )
            for number, (optimizer, micro) in enumerate(product(OPTIMIZERS, sizes))
        ]
    return cells


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_factorization_gives_the_oracles_losses_and_norms(cells: list[Factorization], optimizer: str) -> None:
    chosen = [cell for cell in cells if cell.optimizer == optimizer]
    assert len(chosen) == 6
    expected = oracle.train(_config(chosen[0].run_dir), STEPS)
    for cell in chosen:
        records = metrics(cell.run_dir)
        assert [record["step"] for record in records] == list(range(1, STEPS + 1)), cell
        taken = [after["samples"] - before["samples"] for before, after in pairwise(records)]
        assert min(taken) < cell.global_batch_size, "no ragged window was seen"
        for record, (loss, norm) in zip(records, expected, strict=True):
            assert record["loss"] == pytest.approx(loss, rel=RELATIVE), (cell, record["step"])
            assert record["grad_norm"] == pytest.approx(norm, rel=RELATIVE), (cell, record["step"])


def _config(run_dir: Path) -> dict[str, Any]:
    config = OmegaConf.to_container(OmegaConf.load(run_dir / ".hydra" / "config.yaml"), resolve=True)
    assert isinstance(config, dict)
    return {str(key): value for key, value in config.items()}
