"""Ranks with different numbers of micro-batches, on engines whose forward is a collective, beside DDP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import ROOT, succeed

pytestmark = pytest.mark.slow
WORKER = Path(__file__).parent / "workers" / "uneven_inputs.py"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    result = tmp_path_factory.mktemp("pace") / "result.json"
    succeed(result, world=2, script=WORKER, timeout=120, PYTHONPATH=str(ROOT))
    return json.loads(result.read_text())


@pytest.mark.parametrize("sync", ["boundary", "every"])
@pytest.mark.parametrize("case", ["a spoiled sample", "an unused output", "a dataclass", "two forwards"])
def test_a_rank_that_keeps_pace_adds_nothing(found: Any, case: str, sync: str) -> None:
    expected, steps = found["ddp"][case], found[sync][case]
    assert [applied for applied, _ in steps] == [applied for applied, _ in expected]
    assert [norm for applied, norm in steps if applied] == pytest.approx(
        [norm for applied, norm in expected if applied], rel=1e-5
    )
    assert ("spoiled" in case) == (not all(applied for applied, _ in steps))


@pytest.mark.parametrize("engine", ["ddp", "boundary", "every"])
def test_what_stops_a_run_names_rank_and_micro_batch(found: Any, engine: str) -> None:
    assert "It began on rank 1 in micro-batch 1" in found[engine]["what stops"]


@pytest.mark.parametrize("engine", ["ddp", "boundary", "every"])
def test_random_numbers_of_a_resumed_run_are_those_of_an_uninterrupted_one(found: Any, engine: str) -> None:
    uninterrupted, resumed = found[engine]["resumed"]
    assert len(uninterrupted) >= 2
    assert resumed == uninterrupted


@pytest.mark.parametrize("engine", ["ddp", "boundary", "every"])
def test_saved_statistics_are_those_of_one_rank(found: Any, engine: str) -> None:
    for saved, own in found[engine]["buffers"].values():
        assert saved == own


@pytest.mark.parametrize("engine", ["ddp", "boundary", "every", "zero1"])
def test_what_an_optimizer_counts_in_its_groups_goes_on(found: Any, engine: str) -> None:
    assert found[engine]["counted"] == [2, 0.5]


def test_a_forward_on_one_rank_between_windows_is_refused_on_all(found: Any) -> None:
    assert "a forward of acc.model was called on some ranks alone" in found["boundary"]["alone"]
