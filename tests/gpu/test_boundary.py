"""The boundary on one GPU: nobody waits for it, and it decides as on the CPU. ``pytest -m gpu``."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from distaccum import Accumulator, DataSpec
from distaccum import functional as da
from distaccum.accumulation.step import Outcome
from distaccum.config.precision import PrecisionConfig, ScalerConfig
from distaccum.data import prefetch
from distaccum.data.batches import map_tensors
from distaccum.distributed.world import World
from distaccum.engines.base import Engine
from distaccum.engines.modules import HostCopy
from distaccum.precision.scaler import LossScaler
from tests.support.accumulators import SQUARED_ERRORS

pytestmark = pytest.mark.gpu

SAMPLES, WIDTH = 8, 64
Batch = tuple[Tensor, Tensor]
MakeOptimizers = Callable[[nn.Sequential], Sequence[Optimizer]]


def _one(model: nn.Sequential) -> Sequence[Optimizer]:
    return [AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)]


def _two(model: nn.Sequential) -> Sequence[Optimizer]:
    return [
        AdamW(model[0].parameters(), lr=1e-3, fused=True),
        SGD(model[2].parameters(), lr=1e-3, momentum=0.9, fused=True),
    ]


def _model(world: World) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, 4)).to(world.device)


def _samples(number: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(WIDTH, generator=generator), torch.randn(4, generator=generator)) for _ in range(number)]


def _in_order(samples: list[Batch]) -> DataSpec:
    return DataSpec(train=samples, eval_dataset=None, description="random numbers", shuffle=False)


def _batch(samples: Sequence[Batch], device: torch.device) -> Batch:
    inputs, targets = zip(*samples, strict=True)
    return torch.stack(inputs).to(device), torch.stack(targets).to(device)


def _micro_step(engine: Engine, batch: Batch, *, sync: bool) -> None:
    with engine.micro_step(sync=sync):
        with engine.autocast():
            total = SQUARED_ERRORS(engine.model, batch)
        engine.backward(
            da.normalize_loss(total, {"loss": 2 * SAMPLES}, gradient_divide_factor=engine.gradient_divide_factor)
        )


@contextmanager
def _nobody_waits(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An error where the host waits for the GPU: torch sees copies and reads, but not a wait for an event."""

    def read(_: HostCopy) -> None:
        raise AssertionError("the host has read a copy")

    with monkeypatch.context() as patched:
        patched.setattr(HostCopy, "read", read)
        own = torch.get_device_module(world.device)
        own.set_sync_debug_mode("error")
        try:
            yield
        finally:
            own.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")  # torch says so when it is switched on
@pytest.mark.parametrize("make", [_one, _two])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("clip", [{"clip_norm": 0.1}, {"clip_value": 0.01}, {}], ids=str)
def test_between_two_windows_nobody_waits(
    gpu_world: World, monkeypatch: pytest.MonkeyPatch, clip: dict[str, float], precision: str, make: MakeOptimizers
) -> None:
    """Only the first step of a parameter's may read; the underflow is sampled in every other window."""
    model = _model(gpu_world)
    settings = PrecisionConfig(name=precision, underflow_every=2)
    engine = da.create_engine(model, make(model), gpu_world, precision=settings, **clip)
    batch = _batch(_samples(SAMPLES), gpu_world.device)
    for _ in range(3):
        _micro_step(engine, batch, sync=False)
        _micro_step(engine, batch, sync=True)
        engine.step()
    results = []
    for _ in range(2):
        _micro_step(engine, batch, sync=False)
        _micro_step(engine, batch, sync=True)
        torch.accelerator.synchronize()
        with _nobody_waits(gpu_world, monkeypatch):
            engine.set_lr_factor(0.5)
            results.append(engine.step())
            with engine.micro_step(sync=False), engine.autocast():
                SQUARED_ERRORS(engine.model, batch)
    assert [result.applied for result in results] == [True, True]
    assert any(result.underflow is not None for result in results) == (precision == "fp16")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"hysteresis": 3},
        {"hysteresis": 2, "consecutive_hysteresis": True},
        {"growth_factor": 1.7},
        {"dynamic": False},
    ],
    ids=str,
)
def test_the_loss_scale_moves_on_a_gpu_as_on_the_cpu(gpu_world: World, options: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    found = (torch.rand(300, generator=generator) < 0.2).float().tolist()

    def run(device: torch.device) -> tuple[list[float], dict[str, Any]]:
        scaler = LossScaler(device, init_scale=2.0**10, growth_interval=3, max_scale=2.0**14, **options)
        scales = []
        for one in found:
            scaler.advance(torch.tensor(one, device=device))
            scales.append(scaler.current.item())
        return scales, scaler.state_dict()

    assert run(gpu_world.device) == run(torch.device("cpu"))


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-6), ("fp16", 2e-3), ("bf16", 1.6e-2)])
def test_gradients_are_those_of_fp64_to_within_the_format(gpu_world: World, precision: str, tolerance: float) -> None:
    """The window's gradient as a whole: the norm of the difference over the norm."""
    own = torch.get_device_module(gpu_world.device)
    if precision == "bf16" and not own.is_bf16_supported(including_emulation=False):
        pytest.skip("no bf16 arithmetic")
    model, samples = _model(gpu_world), _samples(2 * SAMPLES)
    exact = _model(gpu_world).double()
    inputs, targets = _batch(samples, gpu_world.device)
    ((exact(inputs.double()) - targets.double()).square().sum() / (2 * SAMPLES)).backward()
    seen: list[Tensor] = []
    optimizer = SGD(model.parameters(), lr=0.0)
    optimizer.register_step_pre_hook(
        lambda *_: seen.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    )
    engine = da.create_engine(model, optimizer, gpu_world, precision=precision)
    _micro_step(engine, _batch(samples[:SAMPLES], gpu_world.device), sync=False)
    _micro_step(engine, _batch(samples[SAMPLES:], gpu_world.device), sync=True)
    assert engine.step().applied
    (gradient,) = seen  # unscaled: an unfused optimizer is given them so
    expected = torch.cat([p.grad.flatten() for p in exact.parameters() if p.grad is not None])
    error = float((gradient.double() - expected).norm() / expected.norm())
    print(f"{precision}: {error:.1e}")
    assert error <= tolerance


@pytest.mark.parametrize("make", [_one, _two])
def test_an_overflow_changes_no_weight_and_halves_the_scale(gpu_world: World, make: MakeOptimizers) -> None:
    samples = _samples(5 * SAMPLES)
    samples[3 * SAMPLES + 1][0].fill_(1e6)  # beyond fp16: the fourth window overflows
    model = _model(gpu_world)
    acc = Accumulator(
        model,
        make(model),
        global_batch_size=SAMPLES,
        micro_batch_size=SAMPLES // 2,
        count=SQUARED_ERRORS.count,
        clip_norm=1.0,
        precision=PrecisionConfig(name="fp16", scaler=ScalerConfig(initial_scale_power=10)),
        world=gpu_world,
    )
    outcomes: list[Outcome] = []
    weights: list[list[Tensor]] = []
    for window in acc.windows(_in_order(samples)):
        outcomes.append(acc.step(window, SQUARED_ERRORS))
        weights.append([p.detach().clone() for p in model.parameters()])
    assert [outcome.applied for outcome in outcomes] == [True, True, True, False, True]
    assert [outcome.loss_scale for outcome in outcomes] == [1024.0, 1024.0, 1024.0, 1024.0, 512.0]
    assert (acc.progress.step, acc.progress.nonfinite) == (4, 1)
    same = [all(map(torch.equal, before, after)) for before, after in pairwise(weights)]
    assert same == [False, False, True, False]
    assert all(weight.isfinite().all() for weight in weights[-1])


def test_batches_copied_beside_the_compute_arrive_whole(gpu_world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights after 20 windows, bit by bit, against a run that copies in between; large batches, small windows."""

    def run(ahead: int) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4096, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4)).to(gpu_world.device)
        acc = Accumulator(
            model,
            _one(model),
            global_batch_size=256,
            micro_batch_size=64,
            count=SQUARED_ERRORS.count,
            prefetch=ahead,
            world=gpu_world,
        )
        for _ in range(5):
            for window in acc.windows(_in_order(wide)):
                acc.step(window, SQUARED_ERRORS)
        return [p.detach().clone() for p in model.parameters()]

    generator = torch.Generator().manual_seed(2)
    wide = [(torch.randn(4096, generator=generator), torch.randn(4, generator=generator)) for _ in range(1024)]
    beside = [run(ahead) for ahead in (2, 4)]

    def in_between(device: torch.device) -> Callable[[Any], Callable[[], Any]]:
        return lambda batch: lambda: map_tensors(batch, lambda tensor: tensor.to(device))

    monkeypatch.setattr(prefetch, "_on_copy_stream", in_between)
    plain = run(2)
    for weights in beside:
        assert all(map(torch.equal, weights, plain))
