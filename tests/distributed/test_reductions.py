"""What goes over the wire: one reduction per bucket and update, whatever the accumulation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.commands import ROOT, succeed

WORKER = Path(__file__).parent / "reductions_worker.py"
RANKS = (0, 1)
MICRO_BATCHES = {"1": [1, 1], "4": [4, 4], "16": [16, 16], "ragged": [0, 1]}  # of each rank


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, int]]]:
    """For each rank, per window, by accumulation: reductions, bytes, broadcasts, and the gradient's own bytes."""
    path = tmp_path_factory.mktemp("counts")
    succeed(path, world=len(RANKS), script=WORKER, PYTHONPATH=str(ROOT))
    return [json.loads((path / f"{rank}.json").read_text()) for rank in RANKS]


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("accumulation", MICRO_BATCHES)
def test_each_bucket_is_reduced_once_per_update(
    counted: list[dict[str, dict[str, int]]], accumulation: str, rank: int
) -> None:
    """Also on a rank that has nothing of a ragged window: it takes part in the others' reduction."""
    counts = counted[rank][accumulation]
    assert counts["micro-batches"] == MICRO_BATCHES[accumulation][rank]
    assert counts["buckets"] == 3
    assert counts["gradient reductions"] == counts["buckets"]
    assert counts["gradient bytes"] == counts["parameter bytes"]
    assert counts["other reductions"] == 1  # the window's count, and whether a rank stops: two fp64
    assert counts["other bytes"] == 16
    assert counts["other collectives"] == 0
