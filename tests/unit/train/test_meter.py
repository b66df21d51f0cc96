"""The numbers of a record, in one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from distaccum.accumulation.accumulator import Accumulator
from distaccum.accumulation.progress import Progress
from distaccum.accumulation.step import Outcome
from distaccum.data.window import Window
from distaccum.distributed.world import World
from distaccum.testing.counters import OperationCounter
from distaccum.train.metrics.meter import Meter


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_ranks_reduce_one_format_whatever_their_own_sums_are_in(gloo_world: World, dtype: torch.dtype) -> None:
    """A rank without a micro-batch cannot know in what the others' losses are computed."""
    counts = {"a": 2.0, "b": 4.0}
    outcome = Outcome(
        step=None,
        loss_sums={"a": torch.tensor(3.0, dtype=dtype), "b": torch.tensor(2.0, dtype=dtype)},
        counts=counts,
        grad_norm=torch.tensor(7.0, dtype=dtype),
    )
    window = Window(epoch=3, samples=2, counts=counts, micro_batches=[], data_wait_s=0.0)
    meter = Meter(gloo_world, Progress())
    meter.add(window, outcome)
    with OperationCounter() as recorded:
        record = meter.record(window, outcome, Progress().after(samples=2, tokens=4, applied=True), lr=0.5)
    assert (record["loss"], record["loss_a"], record["loss_b"], record["grad_norm"]) == (2.0, 1.5, 0.5, 7.0)

    model = nn.Linear(1, 1)
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters()), count=lambda _: counts, world=gloo_world)
    accumulator._counter.all_reduce([accumulator._counter.micro_batch(None)])
    accumulator.tracker.last = outcome
    with OperationCounter() as averaged:
        assert accumulator.mean_loss() == 2.0
    # And the memory of the one rank; and where the ranks are.
    for operations, numbers in ((recorded, 3), (averaged, 3)):
        assert (operations.counts["other reductions"], operations.counts["other bytes"]) == (1, numbers * 8)
        assert operations.counts["gradient reductions"] == 0


def test_a_late_skips_record_ends_with_its_window_and_the_interval_goes_on(
    gloo_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("distaccum.train.metrics.meter.perf_counter", lambda: now[0])
    window = Window(epoch=0, samples=2, counts={"loss": 2.0}, micro_batches=[], data_wait_s=0.0)
    skipped = Outcome(
        loss_sums={"loss": torch.tensor(1.0)}, counts={"loss": 2.0}, grad_norm=torch.tensor(1.0), step=None
    )
    meter, progress = Meter(gloo_world, Progress()), Progress().after(samples=2, tokens=2, applied=False)
    now[0] = 1.0
    meter.add(window, skipped)
    now[0] = 1.75  # the next window is under way when somebody asks
    first = meter.record(window, skipped, progress, lr=0.1)
    now[0] = 2.0
    meter.add(window, skipped)
    second = meter.record(window, skipped, progress.after(samples=2, tokens=2, applied=False), lr=0.1)
    assert [record["step_time_s"] for record in (first, second)] == [1.0, 1.0]
    assert [record["samples_per_s"] for record in (first, second)] == [2.0, 2.0]


def test_the_wait_for_data_is_the_devices_where_there_is_one(gloo_world: World) -> None:
    outcome = Outcome(loss_sums={"loss": torch.tensor(1.0)}, counts={"loss": 2.0}, grad_norm=torch.ones(()), step=None)
    meter, progress = Meter(gloo_world, Progress()), Progress()
    for of_device in (None, lambda: 0.25):
        window = Window(
            epoch=0, samples=2, counts={"loss": 2.0}, micro_batches=[], data_wait_s=0.5, device_wait_s=of_device
        )
        meter.add(window, outcome)
        progress = progress.after(samples=2, tokens=2, applied=True)
    assert meter.record(window, outcome, progress, lr=0.1)["data_wait_s"] == (0.5 + 0.25) / 2
