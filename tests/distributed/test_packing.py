"""Packed documents on DeepSpeed, over gloo: the update is that of the documents alone, each in a forward of its own."""

from itertools import product

import pytest

from tests.support.answers import answer
from tests.support.lora import ROUNDING
from tests.support.optional import needs

pytestmark = needs("deepspeed")

STAGES = [f"deepspeed {stage}" for stage in range(4)]


@pytest.mark.slow
def test_updates_are_those_of_documents_alone() -> None:
    """Of one window, and of three, the last of which is ragged: as near to fp64 as a plain loop in fp32."""
    cells = [(stage, *cell) for stage, cell in product(STAGES, [("learned", 1), ("rotary", 3)])]
    found, wrong = answer("packing", asked=cells, warm="deepspeed", timeout=200), {}
    for cell, (error, plain, apart) in zip(cells, found, strict=True):
        print(cell, f"{error:.1e}, a plain loop {plain:.1e}, apart {apart:.1e}")
        if not error <= max(ROUNDING, 2 * plain):
            wrong[cell] = error, plain
    assert not wrong
