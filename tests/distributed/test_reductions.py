"""What goes over the wire: one reduction per bucket and update, whatever the accumulation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.commands import ROOT, succeed

WORKER = Path(__file__).parent / "reductions_worker.py"


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    """Per window, on rank 1 of 2, by accumulation: reductions, bytes, broadcasts, and the gradient's own bytes."""
    path = tmp_path_factory.mktemp("counts") / "counts.json"
    succeed(path, world=2, script=WORKER, PYTHONPATH=str(ROOT))
    found: dict[str, dict[str, int]] = json.loads(path.read_text())
    return found


@pytest.mark.parametrize("accumulation", ["1", "4", "16"])
def test_each_bucket_is_reduced_once_per_update(counted: dict[str, dict[str, int]], accumulation: str) -> None:
    counts = counted[accumulation]
    assert counts["buckets"] == 3
    assert counts["gradient reductions"] == counts["buckets"]
    assert counts["gradient bytes"] == counts["parameter bytes"]
    assert counts["other reductions"] == 1  # the window's count: one int64
    assert counts["other bytes"] == 8
    assert counts["other collectives"] == 0
