"""Packed documents on DeepSpeed, over gloo: the update is that of the documents alone, each in a forward of its own."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest

from tests.support.commands import ROOT, succeed
from tests.support.lora import ROUNDING
from tests.support.optional import needs

pytestmark = needs("deepspeed")

WORKER = Path(__file__).parent / "workers" / "packing.py"
STAGES = [f"deepspeed {stage}" for stage in range(4)]


@pytest.mark.slow
def test_updates_are_those_of_documents_alone(tmp_path: Path) -> None:
    """Of one window, and of three, the last of which is ragged: as near to fp64 as a plain loop in fp32."""
    cells = [(stage, *cell) for stage, cell in product(STAGES, [("learned", 1), ("rotary", 3)])]
    asked, answered = tmp_path / "cells.json", tmp_path / "errors.json"
    asked.write_text(json.dumps(cells))
    succeed(answered, asked, world=2, script=WORKER, warm="deepspeed", timeout=200, PYTHONPATH=str(ROOT))
    wrong = {}
    for cell, (error, plain, apart) in zip(cells, json.loads(answered.read_text()), strict=True):
        print(cell, f"{error:.1e}, a plain loop {plain:.1e}, apart {apart:.1e}")
        if not error <= max(ROUNDING, 2 * plain):
            wrong[cell] = error, plain
    assert not wrong
