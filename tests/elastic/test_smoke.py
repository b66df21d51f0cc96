"""A rank dies, and its window goes on: the first that CI runs of ``tests/elastic``."""

from pathlib import Path

import pytest

from tests.support.elastic_runs import References, elastic, first_difference


@pytest.mark.slow
def test_a_rank_is_killed_in_its_backward_and_the_run_ends_as_one_that_nobody_disturbs(
    tmp_path: Path, reference: References
) -> None:
    faults = [("0.1.1", "backward", 5, "kill")]
    made = elastic(tmp_path / "run", "elastic.rejoin=false", faults=faults, ranks=2)
    assert first_difference(made.folder, reference()) == ""
