"""Communication of a window: one reduction per bucket and update, whatever the accumulation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import ROOT, succeed

WORKER = Path(__file__).parent / "workers" / "reductions.py"
RANKS = (0, 1)
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}  # of a number
MICRO_BATCHES = {"1": [1, 1], "4": [4, 4], "16": [16, 16], "ragged": [0, 1]}  # of each rank


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    path = tmp_path_factory.mktemp("counts")
    succeed(path, world=len(RANKS), script=WORKER, PYTHONPATH=str(ROOT))
    return [json.loads((path / f"{rank}.json").read_text()) for rank in RANKS]


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("accumulation", MICRO_BATCHES)
def test_each_bucket_is_reduced_once_per_update(counted: list[dict[str, Any]], accumulation: str, rank: int) -> None:
    """This holds on a rank without a sample of a ragged window, too: it joins the others' reduction."""
    counts = counted[rank]["counts"][accumulation]
    assert counts["micro-batches"] == MICRO_BATCHES[accumulation][rank]
    assert counts["buckets"] == 3
    assert counts["gradient reductions"] == counts["buckets"]
    assert counts["gradient bytes"] == counts["parameter bytes"]
    assert counts["other reductions"] == 1  # the window's count, and whether a rank stops: two fp64
    assert counts["other bytes"] == 16
    assert counts["other collectives"] == 0


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("dtype", BYTES)
def test_gradients_travel_in_the_format_that_was_asked_for(
    counted: list[dict[str, Any]], dtype: str, rank: int
) -> None:
    """Four micro-batches: half the bytes in 16 bits, and no further collective."""
    counts, plain = counted[rank]["by dtype"][dtype], counted[rank]["counts"]["4"]
    assert counts["gradient bytes"] * 4 == counts["parameter bytes"] * BYTES[dtype]
    assert counts["gradient reductions"] == counts["buckets"] == 3
    same = ("micro-batches", "other reductions", "other bytes", "other collectives")
    assert {name: counts[name] for name in same} == {name: plain[name] for name in same}


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("dtype", BYTES)
def test_a_reduced_gradient_is_as_exact_as_its_format_allows(
    counted: list[dict[str, Any]], dtype: str, rank: int
) -> None:
    """Each of 100,000 elements against fp64: within three roundings of the format."""
    assert 0.1 < counted[rank]["worst error"][dtype] <= 1.0


@pytest.mark.parametrize("rank", RANKS)
def test_an_average_within_fp16_is_reduced_in_it_where_a_part_is_not(counted: list[dict[str, Any]], rank: int) -> None:
    """80,000 and 20,000: torch's own hook casts before it divides."""
    found = counted[rank]
    assert found["large"] == {"fp32": [100_000.0] * 8, "bf16": [99_840.0] * 8, "fp16": [49_984.0] * 8}
    assert found["large, torch's hook"] == [float("inf")] * 8
