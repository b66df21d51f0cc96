"""After a run, and after one that resumed: the best weights, predictions and tests, on every engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.commands import ROOT, run, succeed

WORKER = Path(__file__).parent / "workers" / "inference.py"


@pytest.mark.parametrize(
    ("world", "warm", "engines"),
    [
        (1, "distaccum", ["ddp", "fsdp2"]),
        pytest.param(2, "distaccum", ["ddp", "zero1", "fsdp2"], marks=pytest.mark.slow),
        pytest.param(2, "deepspeed", ["deepspeed-1", "deepspeed-3"], marks=pytest.mark.slow),
    ],
)
def test_a_trainer_predicts_each_sample_once_in_order_with_the_weights_it_has(
    world: int, warm: str, engines: list[str], tmp_path: Path
) -> None:
    """Ground truth: the checkpoints' weights in fp64, in one process, all samples at once."""
    if warm == "deepspeed":
        pytest.importorskip("deepspeed")
    succeed(tmp_path / "results.json", *engines, world=world, script=WORKER, warm=warm, PYTHONPATH=str(ROOT))
    for away in json.loads((tmp_path / "results.json").read_text()).values():
        assert list(away) == ["step-3", "step-1 of 3", "step-4", "step-1 of 4"]
        assert max(away.values()) < 1e-6


def test_a_rank_that_fails_in_a_forward_of_shards_ends_those_that_wait_for_it(tmp_path: Path) -> None:
    done = run(tmp_path, world=2, script=WORKER, timeout=90, PYTHONPATH=str(ROOT))
    assert done.returncode == 1
    assert "rank 1: ZeroDivisionError: division by zero; rank 0, which waited for it, ends with it" in done.stderr
