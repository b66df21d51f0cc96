"""Communication of a window: one reduction per bucket and update, whatever the accumulation."""

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
@pytest.mark.parametrize("accumulation", [*MICRO_BATCHES, *BYTES])
def test_each_bucket_is_reduced_once_per_update(counted: list[dict[str, Any]], accumulation: str, rank: int) -> None:
    """This holds on a rank without a sample of a ragged window, too: it joins the others' reduction.

    By number format, of four micro-batches: half the bytes in 16 bits, and no further collective.
    """
    counts = (counted[rank]["counts"] | counted[rank]["by dtype"])[accumulation]
    assert counts["micro-batches"] == MICRO_BATCHES.get(accumulation, [4, 4])[rank]
    assert counts["buckets"] == 3
    assert counts["gradient reductions"] == counts["buckets"]
    assert counts["gradient bytes"] * 4 == counts["parameter bytes"] * BYTES.get(accumulation, 4)
    assert counts["other reductions"] == 1  # the window's count, and whether a rank stops: two fp64
    assert counts["other bytes"] == 16
    assert counts["other collectives"] == 0


def test_a_reduced_gradient_is_as_exact_as_its_format_allows(counted: list[dict[str, Any]]) -> None:
    """Each of 100,000 elements against fp64: within three roundings of the format."""
    for rank in counted:
        assert rank["worst error"].keys() == BYTES.keys()
        assert all(0.1 < error <= 1.0 for error in rank["worst error"].values()), rank["worst error"]


@pytest.mark.parametrize("rank", RANKS)
def test_an_average_within_fp16_is_reduced_in_it_where_a_part_is_not(counted: list[dict[str, Any]], rank: int) -> None:
    """80,000 and 20,000: torch's own hook casts before it divides."""
    found = counted[rank]
    assert found["large"] == {"fp32": [100_000.0] * 8, "bf16": [99_840.0] * 8, "fp16": [49_984.0] * 8}
    assert found["large, torch's hook"] == [float("inf")] * 8
