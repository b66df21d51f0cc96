"""The numbers of a record: TFLOP/s and MFU against operations counted by hand and the cards' own sheets; memory."""

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from distaccum import CrossEntropy, DataSpec, Trainer
from distaccum.accumulation.accumulator import Accumulator
from distaccum.accumulation.progress import Progress
from distaccum.accumulation.step import Outcome, all_reduce_loss_sums
from distaccum.data.window import MicroBatch, Window
from distaccum.distributed.world import World
from distaccum.models.gpt import GPT
from distaccum.testing.counters import OperationCounter
from distaccum.tools.flops import ModelFlops, build_utilization, peak_flops
from distaccum.train.metrics.meter import Meter, Utilization
from tests.support.runs import settings
from tests.support.threads import run_ranks

CPU = torch.device("cpu")
LAYERS, HEADS, WIDTH, LENGTH, VOCABULARY = 2, 2, 16, 8, 23


def _gpt(dropout: float = 0.1) -> GPT:
    return GPT(vocab_size=VOCABULARY, seq_len=LENGTH, n_layer=LAYERS, n_head=HEADS, n_embd=WIDTH, dropout=dropout)


def _by_hand(length: int, *, trained: int = 3) -> float:
    """Of a sample: 2 operations a weight and token in each of the forward and the two products of the backward.

    Attention multiplies queries by keys and weights by values, each (T, C) by (C, T) over the heads.
    """
    weights = LAYERS * 12 * WIDTH**2 + VOCABULARY * WIDTH
    attention = LAYERS * 2 * (2 * length**2 * WIDTH)
    return trained * (2 * weights * length + attention)


def _window(*lengths: int, samples: int = 4) -> Window:
    rows = [torch.zeros(samples, length, dtype=torch.int64) for length in lengths]
    micros = [MicroBatch(batch=(row, row), counts={"loss": 1.0}) for row in rows]
    ids = [list(range(samples)) for _ in lengths]
    total = samples * len(lengths)
    return Window(epoch=0, samples=total, counts={"loss": 1.0}, micro_batches=micros, data_wait_s=0.0, ids=lambda: ids)


def _of(*micro_batches: MicroBatch, samples: int = 2, waits: float = 0.0, of_device: Any = None) -> Window:
    counts = {"loss": float(samples)}
    given: Any = {"ids": lambda: [range(samples)], "data_wait_s": waits, "device_wait_s": of_device}
    return Window(epoch=0, samples=samples, counts=counts, micro_batches=[*micro_batches], **given)


def test_a_gpts_operations_are_those_of_palms_formula_in_chunks_and_of_several_lengths_too() -> None:
    flops = ModelFlops(_gpt(), CrossEntropy(), CPU).of_sample(_window(LENGTH))
    assert flops == _by_hand(LENGTH)
    weights = sum(p.numel() for p in _gpt().parameters() if p.ndim > 1)
    assert flops == LENGTH * (6 * weights + 12 * LAYERS * WIDTH * LENGTH)
    assert ModelFlops(_gpt(), CrossEntropy(chunk=3), CPU).of_sample(_window(LENGTH)) == _by_hand(LENGTH)
    flops = ModelFlops(_gpt(), CrossEntropy(), CPU).of_sample(_window(LENGTH, 4, 4))
    assert flops == pytest.approx((_by_hand(LENGTH) + 2 * _by_hand(4)) / 3, rel=1e-12)


def test_what_is_frozen_is_not_multiplied_again() -> None:
    """A linear layer under a frozen one: the forward of both, the gradient through one and of one."""
    layers = nn.Sequential(nn.Linear(6, 5, bias=False), nn.Linear(5, 3, bias=False))
    layers[1].requires_grad_(False)
    micro = MicroBatch(batch=(torch.zeros(4, 6), torch.zeros(4, dtype=torch.int64)), counts={"loss": 4.0})
    assert ModelFlops(layers, CrossEntropy(), CPU).of_sample(_of(micro, samples=4)) == 2 * (2 * 6 * 5 + 2 * 5 * 3)


def test_counting_changes_neither_the_model_nor_random_numbers() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.norm, self.calls = _gpt(), nn.BatchNorm1d(LENGTH), 0
            self.table = torch.ones(VOCABULARY)  # neither a parameter nor a buffer

        def forward(self, ids: Tensor) -> Tensor:
            self.calls += 1
            if random.random() + torch.rand(()) + np.random.rand() > 9:  # noqa: S311, NPY002  as a layer is dropped
                return ids
            return self.norm(self.inner(ids)) * self.table

    model, heard = Counting(), list[bool]()
    model.inner.register_forward_hook(lambda *_: heard.append(True))
    model.inner.blocks[0].register_forward_pre_hook(lambda *_: heard.append(True))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
    assert ModelFlops(model, CrossEntropy(), CPU).of_sample(_window(LENGTH)) == _by_hand(LENGTH)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert str(np.random.get_state()) == str(states[2])  # noqa: NPY002
    assert (model.calls, heard) == (0, [])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None and p.device.type == "cpu" for p in model.parameters())


def test_a_model_that_reads_values_is_told_and_trains_on(caplog: pytest.LogCaptureFixture) -> None:
    class Reads(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * float(x.sum())

    micro = MicroBatch(batch=(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)), counts={"loss": 2.0})
    utilization = Utilization(ModelFlops(Reads(3, 2), CrossEntropy(), CPU).of_sample, peak=1e12, ranks=1)
    utilization.measure(_of(micro))
    assert utilization.is_measured
    assert utilization.metrics(1.0) == {}
    assert "operations cannot be counted" in caplog.text
    assert "metrics.flops_per_sample" in caplog.text


def test_rates_are_of_one_rank_and_of_its_card() -> None:
    utilization = Utilization(3e12, peak=989e12, ranks=4)
    assert utilization.metrics(400.0) == {"tflops_per_rank": 300.0, "mfu": pytest.approx(300 / 989)}
    assert Utilization(3e12, peak=None, ranks=4).metrics(400.0) == {"tflops_per_rank": 300.0}


def test_a_window_without_samples_on_this_rank_is_not_counted() -> None:
    utilization = Utilization(ModelFlops(_gpt(), CrossEntropy(), CPU).of_sample, peak=None, ranks=1)
    utilization.measure(_window())
    assert not utilization.is_measured
    utilization.measure(_window(LENGTH))
    assert utilization.metrics(1.0) == {"tflops_per_rank": _by_hand(LENGTH) / 1e12}


CARDS = {
    ("NVIDIA A100-SXM4-80GB", "bf16"): 312,
    ("NVIDIA A100 80GB PCIe", "tf32"): 156,
    ("NVIDIA H100 80GB HBM3", "fp16"): 989,
    ("NVIDIA H100 PCIe", "bf16"): 756,
    ("NVIDIA H100 NVL", "bf16"): 835,
    ("NVIDIA H200", "fp32"): 67,
    ("NVIDIA B200", "bf16"): 2250,
    ("NVIDIA L4", "bf16"): 121,
    ("NVIDIA L40S", "bf16"): 362,
    ("NVIDIA A10", "bf16"): 125,
    ("NVIDIA GeForce RTX 4090", "bf16"): 165.2,
    ("NVIDIA B200", "fp32"): None,
    ("NVIDIA GB200", "bf16"): None,
    ("NVIDIA A10G", "bf16"): None,
    ("NVIDIA L40", "bf16"): None,
    ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16"): None,
}


@pytest.mark.parametrize(("card", "precision"), CARDS)
def test_a_cards_peak_is_found_by_its_whole_name(card: str, precision: str) -> None:
    expected = CARDS[card, precision]
    assert peak_flops(card, precision) == (None if expected is None else pytest.approx(1e12 * expected))


def test_every_ranks_own_numbers_come_with_the_losses_in_one_reduction() -> None:
    def program(world: World) -> list[float]:
        counts = {"a": 1.0, "b": 1.0}
        sums = {name: torch.tensor(float(world.rank + 1)) for name in counts}
        outcome = Outcome(step=None, loss_sums=sums, counts=counts, grad_norm=torch.tensor(0.0))
        own = [float(2**40 + world.rank), 5.0 - world.rank]
        found: list[float] = all_reduce_loss_sums(outcome, world, own=own).tolist()
        return found

    assert run_ranks(2, program) == [[3.0, 3.0, 2.0**40, 5.0, 2.0**40 + 1, 4.0]] * 2


def test_on_a_cpu_memory_is_what_is_resident_now(gloo_world: World) -> None:
    def resident() -> int:
        outcome = Outcome(step=None, loss_sums={"": one}, counts={"": 1.0}, grad_norm=one)
        meter.add(window, outcome)
        progress = Progress().after(samples=2, tokens=2, applied=True)
        return int(meter.record(window, outcome, progress, lr=0.1)["memory_bytes"])

    one, window, meter = torch.tensor(1.0), _window(), Meter(gloo_world, Progress())
    before = resident()
    held = torch.ones(64 * 2**20)  # of 4 bytes
    during = resident()
    assert during - before >= 0.9 * held.nbytes
    del held
    assert resident() - before <= 128 * 2**20


def _trainer(folder: Path, **metrics: Any) -> Trainer:
    row = torch.arange(LENGTH) % VOCABULARY
    metrics = {"console": True, **metrics}
    config = settings((6, 2), {"max_steps": 2, "log_every": 1, "eval_every": 0}, metrics=metrics, schedule={})
    torch.manual_seed(0)
    data = DataSpec(train=[(row, row)] * 12)
    return Trainer(_gpt(), CrossEntropy(), data, config=config, run_dir=folder)


def _trained(folder: Path, **metrics: Any) -> list[Mapping[str, Any]]:
    _trainer(folder, **metrics).fit()
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_reports_them_where_the_peak_is_known(
    gloo_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = _trained(tmp_path / "plain")
    assert not {"mfu", "tflops_per_rank"} & plain[0].keys()
    told = _trained(tmp_path / "told", peak_tflops=0.5)
    for record in told:
        assert record["tflops_per_rank"] == pytest.approx(record["samples_per_s"] * _by_hand(LENGTH) / 1e12)
        assert record["mfu"] == pytest.approx(record["tflops_per_rank"] / 0.5)
    assert [record["loss"] for record in told] == [record["loss"] for record in plain]
    assert " TFLOP/s  MFU " in capsys.readouterr().out


def test_stated_operations_are_taken_and_a_cpu_has_no_peak(tmp_path: Path) -> None:
    stated = build_utilization(_trainer(tmp_path, flops_per_sample=7e9)._components, 2)
    assert stated is not None
    assert stated.is_measured
    assert stated.metrics(4000.0) == {"tflops_per_rank": 14.0}
    assert build_utilization(_trainer(tmp_path)._components, 2) is None


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
    # And the memory of the one rank, and whether its loss logs a new name; and where the ranks are.
    for operations, numbers in ((recorded, 4), (averaged, 3)):
        assert (operations.counts["other reductions"], operations.counts["other bytes"]) == (1, numbers * 8)
        assert operations.counts["gradient reductions"] == 0


def test_a_late_skips_record_ends_with_its_window_and_the_interval_goes_on(
    gloo_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("distaccum.train.metrics.meter.perf_counter", lambda: now[0])
    window = _of()
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
        window = _of(waits=0.5, of_device=of_device)
        meter.add(window, outcome)
        progress = progress.after(samples=2, tokens=2, applied=True)
    assert meter.record(window, outcome, progress, lr=0.1)["data_wait_s"] == (0.5 + 0.25) / 2
