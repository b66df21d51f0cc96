"""Evaluations do not depend on the number of ranks, nor does it matter which rank asks to stop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import ROOT, succeed

WORKER = Path(__file__).parent / "workers" / "evaluation.py"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    found = {}
    for world in (1, 3):
        path = tmp_path_factory.mktemp(str(world)) / "results.json"
        succeed(path, world=world, script=WORKER, PYTHONPATH=str(ROOT))
        found[world] = json.loads(path.read_text())
    return found


@pytest.mark.parametrize("held_out", ["23", "2"])  # of 3 ranks, one holds less; one holds nothing
def test_results_are_those_of_one_process(results: dict[int, dict[str, Any]], held_out: str) -> None:
    alone, shared = results[1][held_out], results[3][held_out]
    names = [name for name in shared if name.startswith("eval_")]
    assert names == ["eval_loss", "eval_accuracy"] + (["eval_acc", "eval_auroc"] if held_out == "23" else [])
    assert [shared[name] for name in names] == pytest.approx([alone[name] for name in names], rel=1e-5)


@pytest.mark.parametrize("world", [1, 3])
def test_the_same_weights_give_the_same_numbers_on_any_number_of_ranks_and_workers(
    results: dict[int, dict[str, Any]], world: int
) -> None:
    alone = results[1]["0 workers"]
    assert alone["eval_loss"] == pytest.approx(alone["fp64"], rel=1e-6)
    assert alone["eval_samples"] == 23
    for workers in ("0 workers", "2 workers"):
        assert results[world][workers] == pytest.approx(alone, rel=1e-15)  # the order of fp64 sums


@pytest.mark.parametrize("world", [1, 3])
def test_one_rank_stops_all(results: dict[int, dict[str, Any]], world: int) -> None:
    for held_out in ("23", "2"):
        found = results[world][held_out]
        assert (found["state"], found["step"], found["reason"]) == ("done", 4, "rank 0 has seen enough")
    assert results[world]["level 2"] == 2
