from __future__ import annotations

from pathlib import Path

import pytest

from distaccum.errors import DataError, DistaccumError, SpikeError
from distaccum.train.failure import lines_of, reason_of
from distaccum.train.run_dir import RunDir


@pytest.mark.parametrize(("error", "resumes"), [(DataError("a bad line"), True), (SpikeError("again"), False)])
def test_the_same_command_is_no_way_on_for_what_would_happen_again(
    tmp_path: Path, error: DistaccumError, *, resumes: bool
) -> None:
    run_dir = RunDir(tmp_path)
    with run_dir.own():
        run_dir.begin()
        run_dir.note_saved(4)
        run_dir.write_failure(reason_of(0, error))
        lines = lines_of(run_dir)
    assert lines[0] == f"the run failed: rank 0: {error.__class__.__name__}: {error}"
    assert any("the same command with resume=auto" in line for line in lines) == resumes
