"""The promise: whatever the world and the micro-batch, the losses and gradient norms are those of the global batch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.support import oracle
from tests.support.commands import QUIET, TINY, metrics, succeed

STEPS = 8
# 145 samples of 16 bytes: a window of 48 or of 50 leaves a ragged last one, and 8 windows see two epochs end.
TEXT = "The quick brown fox jumps over the lazy dog, again and again; " * 44
SIZES = {1: (48, 7), 2: (6, 5), 3: (4,), 4: (12,)}  # micro-batch sizes for each world size
OPTIMIZERS = ("sgd", "adamw")
TOLERANCE = 1e-5  # relative, fp32


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path


@dataclass(frozen=True)
class Cell:
    """One factorization of one training run."""

    world: int
    micro_batch_size: int
    global_batch_size: int
    optimizer: str
    run_dir: Path


@pytest.fixture(
    scope="module", params=[pytest.param(50, marks=pytest.mark.slow), pytest.param(48, marks=pytest.mark.heavy)]
)
def cells(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, text: Path) -> list[Cell]:
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
            Cell(
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
def test_every_factorization_gives_the_oracles_losses_and_norms(cells: list[Cell], optimizer: str) -> None:
    chosen = [cell for cell in cells if cell.optimizer == optimizer]
    assert len(chosen) == 6
    expected = oracle.train(_config(chosen[0].run_dir), STEPS)
    for cell in chosen:
        records = metrics(cell.run_dir)
        assert [record["step"] for record in records] == list(range(1, STEPS + 1)), cell
        taken = [after["samples"] - before["samples"] for before, after in pairwise(records)]
        assert min(taken) < cell.global_batch_size, "no ragged window was seen"
        for record, (loss, norm) in zip(records, expected, strict=True):
            assert record["loss"] == pytest.approx(loss, rel=TOLERANCE), (cell, record["step"])
            assert record["grad_norm"] == pytest.approx(norm, rel=TOLERANCE), (cell, record["step"])


def _config(run_dir: Path) -> dict[str, Any]:
    config = OmegaConf.to_container(OmegaConf.load(run_dir / ".hydra" / "config.yaml"), resolve=True)
    assert isinstance(config, dict)
    return {str(key): value for key, value in config.items()}
