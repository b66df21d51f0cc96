"""The parts ``speed`` and ``size`` of the GPU bench, on the CPU: what they count, and that each measurement runs."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import initialize_config_dir
from torch import Tensor, nn

from distaccum.accumulation.step import Outcome
from distaccum.config.schema import conf_dir
from distaccum.distributed.world import World
from distaccum.train.callbacks import Callback, Run
from launch.bench.gpu import boundary, fitting, rates, runs, size, speed
from launch.bench.gpu.figures import Figure, Options
from launch.bench.gpu.peak_memory import peak_of_window
from launch.bench.gpu.reference_loop import batches, reference_loop
from launch.bench.gpu.stall import stalls
from launch.bench.gpu.synchronisations import WINDOWS, synchronisations
from launch.bench.gpu.timing import ratios, seconds_of_windows

CPU = torch.device("cpu")
SMALL, FULL = Options(device=CPU, small=True), Options(device=CPU, small=False)
MEMORY = "memory 124m"
OF_TORCH = pytest.mark.filterwarnings(  # fp16 on a CPU; what torch.compile looks at
    "ignore::UserWarning", "ignore:.*Function.* should not be instantiated:DeprecationWarning"
)
CLIPPED = ("precision=fp32", "loss=cross_entropy", "optim.lr=0.01", "optim.clip_norm=0.1", "schedule.warmup_steps=0")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tensors of a few kilobytes: threads would take most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _values(figures: list[Figure]) -> dict[str, float | str]:
    return {figure.name: figure.value for figure in figures}


def test_runs_are_the_experiments_with_half_a_million_tokens_a_window() -> None:
    for within in (False, True):
        config = _config_within_hydra() if within else runs.run_config(FULL, "124m", micro_size=64, accumulation=8)
        assert runs.tokens_of_window(config) == 524_288
        assert (config.batch.micro_size, config.precision.name, config.loss["chunk"]) == (64, "bf16", 2048)
        assert (config.trainer.verify, config.checkpoint.every) == ("never", 0)


def _config_within_hydra() -> Any:
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return runs.run_config(FULL, "124m", micro_size=64, accumulation=8)


@pytest.mark.parametrize(
    ("model", "layers", "width"), [("124m", 12, 768), pytest.param("1.5b", 48, 1600, marks=pytest.mark.slow)]
)
def test_a_rate_is_tokens_over_seconds_and_mfu_is_palms(model: str, layers: int, width: int) -> None:
    """PaLM's 6 N + 12 L H Q T a token, of the matrices that a token is multiplied by."""
    config = runs.run_config(FULL, model, micro_size=16, accumulation=8)
    values = _values(rates.rate(FULL, model, config, 2.0, peak=989e12))
    padded = 50_304
    per_token = 6 * (12 * layers * width**2 + padded * width) + 12 * layers * width * 1024
    tokens_per_s = 16 * 8 * 1024 / 2.0
    assert values["tokens per second"] == tokens_per_s
    assert values["operations"] == pytest.approx(per_token * tokens_per_s / 1e12, rel=1e-3)
    assert values["MFU"] == pytest.approx(100 * per_token * tokens_per_s / 989e12, rel=1e-3)


@pytest.mark.parametrize(("options", "seconds", "holds"), [(FULL, 2.0, True), (FULL, 2.1, False), (SMALL, 2.0, None)])
def test_a_target_is_judged_on_the_real_sizes_alone(options: Options, seconds: float, holds: bool | None) -> None:
    config = runs.run_config(SMALL, "124m", micro_size=8, accumulation=2)
    of_tokens, operations = rates.rate(options, "", config, seconds, least=8 * 2 * 32 / 2.0)
    assert (of_tokens.target, of_tokens.holds) == ("at least 256", holds)
    assert (operations.target, operations.holds) == ("", None)


def test_shapes_are_those_of_gpt_2() -> None:
    shapes = boundary.shapes_of(FULL, "124m")
    assert sum(map(math.prod, shapes)) == 124_439_808 + 47 * 768 - 768 * (12 * 11 + 1)  # padded; without biases
    assert shapes[:2] == [(50_304, 768), (1024, 768)]


def test_traffic_is_what_operators_read_and_write() -> None:
    one, other = torch.ones(100), torch.ones(100)

    def moved(work: Any) -> int:
        with boundary.Traffic() as traffic:
            work()
        return traffic.bytes

    assert moved(lambda: one + other) == 1200
    assert moved(lambda: one + one) == 800  # read once
    assert moved(lambda: one.add_(other)) == 1200
    assert moved(one.zero_) == 400
    assert moved(lambda: one.copy_(other)) == 800
    assert moved(lambda: one.view(10, 10)) == 0
    assert moved(lambda: torch._foreach_mul_([one, other], 2.0)) == 1600
    assert moved(lambda: torch._foreach_norm([one, other])) == 808


# Words of four bytes that pass between memory and the device, by what the sequences have to do with a parameter.
NORM, CLIP, STEP, FOREACH_STEP = 1, 2, 4 + 3, 2 + 3 + 2 + 3 + 2 + 2 + 2 + 4
UNSCALE = 2
EXPECTED = {
    False: {
        "torch, foreach": NORM + CLIP + FOREACH_STEP,
        "torch, fused": NORM + CLIP + STEP,
        "distaccum": NORM + STEP + 1,
    },
    True: {"torch, fused": UNSCALE + NORM + CLIP + STEP, "distaccum": NORM + STEP + 1},
}


@pytest.mark.parametrize("scaled", [False, True])
def test_a_boundary_moves_the_bytes_that_are_counted_by_hand(scaled: bool) -> None:
    """The fused kernel reads gradients, and writes them where it divides them."""
    values = _values(boundary.measure(SMALL, "124m", scaled=scaled, bandwidth=1e9))
    for name, words in EXPECTED[scaled].items():
        assert values[f"{name}, bytes of a parameter moved"] == pytest.approx(4 * words, abs=0.5), name
    assert values["zeroing in place, bytes of a parameter moved"] == 4


def test_a_boundary_changes_the_weights_as_torchs_does() -> None:
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(shape, generator=generator) for shape in ((8, 4), (16,))]
    source = [torch.randn(weight.shape, generator=generator) for weight in weights]
    after = {}
    for name in (boundary.FOREACH, boundary.FUSED, boundary.OURS):
        gradients = [gradient.clone() for gradient in source]
        parameters = [nn.Parameter(weight.clone()) for weight in weights]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        if name == boundary.OURS:
            boundary.fused_update(parameters)()
        else:
            boundary.clipped_step(parameters, **{name.removeprefix("torch, "): True})()
        after[name] = torch.cat([parameter.detach().flatten() for parameter in parameters])
    assert not torch.equal(after[boundary.FUSED], torch.cat([weight.flatten() for weight in weights]))
    for name in (boundary.FUSED, boundary.OURS):
        torch.testing.assert_close(after[name], after[boundary.FOREACH], rtol=1e-5, atol=1e-7)


class Reads(Callback):
    """Waits for the device after every update."""

    def on_update(self, run: Run, outcome: Outcome) -> None:
        outcome.grad_norm.item()


@pytest.mark.parametrize("callbacks", [(), (Reads(),)], ids=["none", "reads"])
def test_who_reads_the_device_is_counted(callbacks: tuple[Callback, ...], gloo_world: World, tmp_path: Path) -> None:
    config = runs.run_config(SMALL, "124m", micro_size=2, accumulation=2)
    components = runs.components_of(config, gloo_world, callbacks)
    step = speed.warmed_up(speed.trainer(components, gloo_world, str(tmp_path)))
    found = synchronisations(step, CPU)
    expected = WINDOWS * len(callbacks)
    assert found["operators that wait"] == expected
    assert found["reads of what was queued last"] == expected  # whether it was applied, for the callback


def test_the_loop_by_hand_trains_as_the_trainer_does(gloo_world: World, tmp_path: Path) -> None:
    config = runs.run_config(SMALL, "124m", *CLIPPED, micro_size=4, accumulation=2)
    ours, theirs = (runs.components_of(config, gloo_world, epoch=2) for _ in range(2))
    before = {name: weight.clone() for name, weight in theirs.model.state_dict().items()}
    steps = [speed.trainer(ours, gloo_world, str(tmp_path)), reference_loop(theirs, gloo_world)]
    for step in steps:
        for _ in range(3):  # into a second epoch
            step()
    trained = ours.model.state_dict()
    for name, weight in theirs.model.state_dict().items():
        torch.testing.assert_close(trained[name], weight, rtol=1e-4, atol=1e-6)
        assert not torch.equal(before[name], weight), name


def test_both_loops_are_given_random_tokens_below_the_vocabulary(gloo_world: World) -> None:
    config = runs.run_config(SMALL, "124m", micro_size=4, accumulation=2)
    given: Iterator[tuple[Tensor, Tensor]] = batches(runs.components_of(config, gloo_world), gloo_world)
    inputs, labels = next(given)
    assert inputs.shape == labels.shape == (4, 32)
    assert torch.equal(inputs[:, 1:], labels[:, :-1])
    assert 200 < int(inputs.max()) < 256


def test_a_stall_is_a_saving_window_less_a_plain_one() -> None:
    """Windows of 1 s; saves at the end of every fourth hold up 3 and 2 s, and slow two more windows and one down."""
    times = [9.0, 1.0, 1.0, 4.0, 1.5, 1.5, 1.0, 3.0, 1.25, 1.0, 1.0]
    complete = [0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 2]
    found = stalls(times, complete, every=4, warm_up=1)
    assert (found.window_s, found.at_once, found.in_all, found.in_time) == (1.0, [3.0, 2.0], [4.0, 2.25], True)
    late = stalls(times, [0, 0, 0, 0, 0, 0, 0, 1, 2, 2, 2], every=4, warm_up=1)  # the second save waits for the first
    assert not late.in_time
    assert not stalls(times, [0] * 5 + [1] * 6, every=4, warm_up=1).in_time  # the second is never published
    waited = stalls(times, [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2], every=4, warm_up=1)
    assert waited.at_once == waited.in_all == [3.0, 2.0]


def test_the_largest_micro_batch_is_told_from_two_small_ones() -> None:
    def peak(micro_size: int) -> int:
        return 100 + 7 * micro_size

    sizes = fitting.estimate(peak, 1000.0, trials=(2, 4), most=1000)
    assert sizes == [128, 108, 88]  # 128 x 7 + 100 = 996; even numbers
    assert fitting.estimate(peak, 1000.0, trials=(2, 4), most=16) == [16, 12, 10]
    assert fitting.estimate(peak, 50.0, trials=(2, 4), most=16) == [2]


@pytest.mark.slow
def test_a_smaller_micro_batch_is_tried_where_memory_is_over() -> None:
    tried = []

    def measure(micro_size: int) -> int:
        tried.append(micro_size)
        if micro_size > 20:
            raise torch.OutOfMemoryError
        return micro_size

    assert fitting.at_largest(measure, (64, 32, 16, 8), CPU) == 16
    assert tried == [64, 32, 16]
    with pytest.raises(torch.OutOfMemoryError):
        fitting.at_largest(measure, (64, 32), CPU)


@pytest.mark.slow
def test_the_peak_of_a_window_is_its_own_tensors() -> None:
    kept = torch.ones(1000)

    def step() -> None:
        torch.ones(2**20).sum()  # 4 MiB, on top of what is kept

    found = peak_of_window(step, CPU)
    assert 2**22 <= found.most - found.held < 2**22 + 2**16
    assert found.held >= kept.nbytes


def test_loops_are_timed_in_turn_and_no_longer_than_stated() -> None:
    order: list[str] = []
    steps = {name: (lambda name=name: order.append(name)) for name in "ab"}
    taken = seconds_of_windows(steps, CPU, windows=2, rounds=3, within_s=60)
    assert order == list("aabb" * 3)
    assert [len(times) for times in taken.values()] == [3, 3]
    assert [len(times) for times in seconds_of_windows(steps, CPU, windows=1, rounds=9, within_s=0).values()] == [2, 2]
    assert ratios([2.0, 3.0, 8.0], [1.0, 2.0, 2.0]) == (1.5, 2.0)


@pytest.mark.slow
@OF_TORCH
@pytest.mark.parametrize(
    ("part", "name"),
    [
        pytest.param(part, name, marks=() if name == "boundary" else pytest.mark.heavy)
        for part in (speed, size)
        for name in part.MEASUREMENTS
        if not name.startswith("memory")
    ],
)
def test_a_measurement_runs_in_small(part: Any, name: str) -> None:
    _check(part.MEASUREMENTS[name](SMALL))


def _check(figures: list[Figure]) -> None:
    assert figures
    assert len({(figure.of, figure.name) for figure in figures}) == len(figures)
    for figure in figures:
        assert figure.holds is None, "targets are a GPU's"
        assert figure.target != "0" or figure.value == 0, figure
        assert isinstance(figure.value, str) or math.isfinite(figure.value), figure


@pytest.mark.heavy
def test_what_is_held_at_the_step_is_the_forecast() -> None:
    """And the few kilobytes of a batch and of the generators' states, of half a megabyte."""
    found = size.MEASUREMENTS[MEMORY](SMALL)
    _check(found)
    held = [figure.value for figure in found if figure.name == "held over the forecast"]
    assert len(held) == len(size.ENGINES)
    assert all(isinstance(ratio, float) and 1.0 <= ratio < 1.06 for ratio in held), held
