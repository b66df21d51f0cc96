"""The numbers of a record, in one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from distaccum.accumulator import Accumulator
from distaccum.clocks import Clocks
from distaccum.metrics.meter import Meter
from distaccum.testing.counters import Operations
from distaccum.window import Outcome, Window
from distaccum.world import World


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_ranks_reduce_one_format_whatever_their_own_sums_are_in(gloo_world: World, dtype: torch.dtype) -> None:
    """A rank without a micro-batch cannot know in what the others' losses are computed."""
    counts = {"a": 2.0, "b": 4.0}
    outcome = Outcome(
        step=None, loss_sums={"a": torch.tensor(3.0, dtype=dtype), "b": torch.tensor(2.0, dtype=dtype)},
        counts=counts, grad_norm=torch.tensor(7.0, dtype=dtype),
    )  # fmt: skip
    window = Window(epoch=3, samples=2, counts=counts, micro_batches=[], data_wait_s=0.0)
    meter = Meter(gloo_world, Clocks())
    meter.add(window, outcome)
    with Operations() as recorded:
        record = meter.record(window, outcome, Clocks().after(samples=2, tokens=4, applied=True), lr=0.5)
    assert (record["loss"], record["loss_a"], record["loss_b"], record["grad_norm"]) == (2.0, 1.5, 0.5, 7.0)

    model = nn.Linear(1, 1)
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters()), world=gloo_world)
    accumulator.attempts.last = outcome
    with Operations() as averaged:
        assert accumulator.mean_loss() == 2.0
    for operations in (recorded, averaged):
        assert (operations.counts["other reductions"], operations.counts["other bytes"]) == (1, 2 * 8)
        assert operations.counts["gradient reductions"] == 0
