"""ddp and zero1: a model or a loss that communicates needs as many micro-batches on every rank."""

import json
import re
from pathlib import Path

import pytest

from tests.support.commands import run

WORKER = Path(__file__).parent / "workers" / "communicating_forward.py"


@pytest.mark.parametrize("engine", ["ddp", "zero1"])
def test_uneven_windows_are_refused_on_all_ranks_and_even_ones_train(engine: str) -> None:
    """The second is even but for its last window, the third is uneven at once: neither hangs, no weight moves."""
    done = run(engine, world=2, script=WORKER, timeout=60)
    assert done.returncode == 0, done.stderr
    ranks = [json.loads(line) for line in re.findall(r"rank \d: (\{.*\})", done.stdout)]
    assert len(ranks) == 2
    message = (
        r"^the model's forward or the loss communicates in every micro-step, and ranks have different numbers of "
        r"micro-batches in this step: {} and {}\. "
    )
    for found in ranks:
        assert found["4"] == 2
        assert found["gathered"] <= 1e-6  # of a gradient that comes back as a transpose
        assert "all_gather() of tensors of [[2, 3], [3, 3]]" in found["unlike"]
        for size, most, fewest in (("6", 2, 1), ("5", 3, 2)):
            refusal, untouched = found[size]
            assert re.match(message.format(most, fewest), refusal)
            assert untouched


def test_a_rank_out_of_memory_in_the_first_forward_does_not_gather_once_more() -> None:
    done = run("ddp", "full", world=2, script=WORKER, timeout=60)
    assert done.returncode != 0
    assert "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB" in done.stderr
    assert "begins again" not in done.stderr
