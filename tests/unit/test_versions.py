"""The table of docs/versions.md is the script's own, and holds what the code says of versions."""

from __future__ import annotations

import pytest

from distaccum.engines.deepspeed.internals import WORKING
from distaccum.engines.fsdp2.internals import NEWEST, OLDEST
from tests.support.versions import DOCUMENT, ENGINES, STAGES, rows_of, written

TEXT = DOCUMENT.read_text()
ROWS = rows_of(TEXT)


def test_the_script_would_write_the_table_as_it_stands() -> None:
    assert written(TEXT, ROWS) == TEXT


def test_every_cell_is_exact_or_refused() -> None:
    assert {cell for cells in ROWS.values() for cell in cells} <= {"exact", "refused"}


@pytest.mark.parametrize("torch", [f"{OLDEST}.0", "2.10.0", "2.13.0", f"{NEWEST}.0"])
def test_the_oldest_and_the_newest_that_are_said_to_work_were_run(torch: str) -> None:
    assert all(ROWS[torch, "", engine] == ("exact",) * 4 for engine in ENGINES)
    assert all(ROWS[torch, WORKING[1], stage] == ("exact",) * 4 for stage in STAGES)


@pytest.mark.parametrize("torch", [OLDEST, NEWEST])
def test_the_oldest_deepspeed_was_run_with_both_ends(torch: str) -> None:
    assert {(f"{torch}.0", WORKING[0], stage) for stage in STAGES} <= ROWS.keys()
