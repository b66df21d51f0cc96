"""Losses that compare the samples of a window: on every engine, on any number of ranks, with random numbers."""

import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.mutants import two_pass as mutants
from tests.support.commands import ROOT, succeed

WORKER = Path(__file__).parent / "workers" / "two_pass.py"
ENGINES = ("ddp", "zero1", "fsdp2")
# The last window has 5 samples: all ranks as many micro-batches; 2 on three ranks: one has none; 4: one has more.
SIZES = ({}, {"size": 26}, {"size": 28, "micro_size": 1})
Cell = Mapping[str, Any]


def _run(folder: Path, cells: Sequence[Cell], world: int, *, warm: str = "distaccum") -> list[dict[str, Any]]:
    asked, answered = folder / f"cells-{world}.json", folder / f"errors-{world}.json"
    asked.write_text(json.dumps(cells))
    succeed(answered, asked, world=world, script=WORKER, timeout=150, warm=warm, PYTHONPATH=str(ROOT))
    found: list[dict[str, Any]] = json.loads(answered.with_name(f"{answered.name}.details").read_text())
    for cell, each in zip(cells, found, strict=True):
        print(world, dict(cell), each["error"], each.get("refused", ""))
    return found


@pytest.mark.slow
def test_the_gradient_is_that_of_the_whole_window_on_three_ranks(tmp_path: Path) -> None:
    cells: list[Cell] = [{"engine": engine, **size} for engine in ENGINES for size in SIZES]
    cells += [{"engine": "ddp", "loss": "balanced"}, {"engine": "fsdp2 every", "loss": "balanced", "size": 26}]
    found = _run(tmp_path, [*cells, {"engine": "fsdp2", "plain": True, "verify": "never"}], 3)
    assert max(each["error"] for each in found[:-1]) <= 1e-12
    assert all("agrees with plain autograd" in each["verified"] for each in found[:-1])
    assert found[-1]["error"] > 0.5  # plain accumulation


# Shares of 12, 6, 4 samples: the same micro-batches on 1, 2 and 3 ranks.
RANDOM = {"global_size": 12, "micro_size": 2, "size": 36}


@pytest.mark.slow
def test_random_numbers_do_not_depend_on_the_ranks(tmp_path: Path) -> None:
    cells = [
        {"engine": engine, **RANDOM, **more}
        for engine in ENGINES
        for more in ({"dropout": 0.5}, {"dropout": 0.2, "loss": "sampled", "verify": "never"})
    ]
    found = {world: _run(tmp_path, cells, world) for world in (1, 2, 3)}
    for i, cell in enumerate(cells):
        for world in (2, 3):
            assert found[world][i]["weights"] == pytest.approx(found[1][i % 2]["weights"], rel=1e-9, abs=1e-12), cell
            assert found[world][i]["losses"] == pytest.approx(found[1][i % 2]["losses"], rel=1e-9), cell
    assert found[1][0]["weights"] != pytest.approx(found[1][1]["weights"], rel=1e-3)


@pytest.mark.slow
def test_with_a_loss_scale(tmp_path: Path) -> None:
    cells = [{"engine": engine, "precision": "fp16", "dtype": "float32", "size": 36} for engine in ENGINES]
    assert max(each["error"] for each in _run(tmp_path, cells, 2)) <= 8 * 2.0**-11


@pytest.mark.slow
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.heavy) for stage in (0, 1, 2)), 3])
def test_on_deepspeed(tmp_path: Path, stage: int) -> None:
    cells = [{"engine": f"deepspeed {stage}", "dtype": "float32", **size} for size in SIZES]
    found = _run(tmp_path, [*cells, {**cells[0], "loss": "balanced"}], 3, warm="deepspeed")
    assert max(each["error"] for each in found) <= 1e-6


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_every_mutant_is_caught() -> None:
    assert mutants.main() == 0
