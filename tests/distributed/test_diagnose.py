"""A NaN on one rank: every rank says the same of where it began."""

from typing import Any

import pytest

from tests.distributed.workers import diagnose as diagnose_worker
from tests.support.answers import answer

EXPECTED = {
    "rank": 1,
    "micro_batch": 1,
    "samples": [4, diagnose_worker.SPOILED],
    "stage": "input",
    "module": "",
    "parameters": ["2.weight", "2.bias", "0.weight", "0.bias"],
}


@pytest.fixture(scope="module")
def results() -> Any:
    return answer("diagnose", timeout=60)


@pytest.mark.parametrize("case", ["fewer", "none"])
def test_all_ranks_name_the_rank_the_micro_batch_and_its_samples(results: dict[str, Any], case: str) -> None:
    """Rank 0 has fewer micro-batches than rank 1, or none."""
    assert not results[case]["finite"]
    for findings in results[case]["ranks"]:
        (found,) = findings
        assert sorted(found["parameters"]) == sorted(EXPECTED["parameters"])
        assert found["parameters"][0].startswith("2.")  # the backward begins at the end
        assert found | {"parameters": EXPECTED["parameters"]} == EXPECTED
    assert results[case]["ranks"][0] == results[case]["ranks"][1]


def test_a_clean_window_says_nothing(results: dict[str, Any]) -> None:
    assert results["clean"] == {"finite": True, "ranks": [[], []]}
