"""Windows of what arrives on the ranks: their gradient is that of all of it, whoever has how much."""

import pytest

from tests.distributed.workers.arriving import PASSES, ROLLOUTS
from tests.support.answers import answer

TOLERANCE = 1e-6
slow, heavy = pytest.mark.slow, pytest.mark.heavy


@pytest.mark.parametrize(
    ("world", "warm", "engines"),
    [
        (2, "distaccum", ["ddp"]),
        pytest.param(3, "distaccum", ["zero1", "fsdp2"], marks=slow),
        pytest.param(2, "deepspeed", ["deepspeed"], marks=slow),
        pytest.param(1, "distaccum", ["ddp", "zero1", "fsdp2"], marks=heavy),
        pytest.param(4, "distaccum", ["ddp", "zero1", "fsdp2"], marks=heavy),
        *(pytest.param(ranks, "deepspeed", ["deepspeed", "deepspeed 3"], marks=heavy) for ranks in (1, 3, 4)),
    ],
)
def test_a_window_is_all_that_came(world: int, warm: str, engines: list[str]) -> None:
    found = answer("arriving", asked=engines, world=world, warm=warm)
    assert len(found["trainings"]) == 3 * len(engines)
    rollouts = ROLLOUTS - 1 - (world == 1)  # one counts nothing, and of one rank another is empty
    for training in found["trainings"]:
        assert training["off"] <= TOLERANCE, training
        assert training["noise"] == pytest.approx([1.0] * len(training["noise"]), rel=1e-4)
        assert (training["steps"], training["windows"]) == (PASSES * rollouts, PASSES * ROLLOUTS), training
    first, *others = found["said"]
    assert first == "OSError: the sampler of rank 0 is gone"
    assert all("PeerError" in said and "the sampler of rank 0 is gone" in said for said in others)
    one = "not with several micro-batches: give a list, as in acc.window([batch])"
    told = [f"window() with one dict, {one}", f"window() with one Tensor, {one}"]
    told += ["window() after stop(): end the loop once acc.stopping is true"]
    told += ["window(count=...) of an Accumulator without a count: give Accumulator(count=...) too"]
    assert found["refused"] == told
