"""The boundary's arithmetic against torch's textbook sequence: GradScaler.unscale_, clip, step."""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer

from distaccum.config.precision import ScalerConfig
from distaccum.engines.optimizer_step import FusedUpdate, StepOptions, underflow_fraction
from distaccum.errors import MisuseError
from distaccum.precision.loss_scale import LossScale

Make = Callable[..., Optimizer]
OPTIMIZERS = [partial(AdamW, lr=1e-2, weight_decay=0.1), partial(SGD, lr=1e-2, momentum=0.9, dampening=0.3)]
BAD = [float("nan"), float("inf"), -float("inf")]


def _parameters(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (5, 3), "b": (7,), "c": ()}
    return {name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for name, shape in shapes.items()}


def _set_gradients(parameters: dict[str, nn.Parameter], seed: int, scale: float | Tensor = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters.values():
        parameter.grad = (torch.randn(parameter.shape, generator=generator) * scale).to(parameter.dtype)


def _update(optimizers: Sequence[Optimizer], parameters: dict[str, nn.Parameter], **options: Any) -> FusedUpdate:
    return FusedUpdate(optimizers, parameters, StepOptions(**options))


def _snapshot(parameters: dict[str, nn.Parameter], optimizers: Sequence[Optimizer]) -> list[Tensor]:
    states = [copy.deepcopy(optimizer.state_dict()["state"]) for optimizer in optimizers]
    kept = [value for state in states for values in state.values() for value in values.values()]
    return [p.detach().clone() for p in parameters.values()] + [v for v in kept if isinstance(v, Tensor)]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("clip", [{}, {"clip_norm": 0.5}, {"clip_norm": 100.0}, {"clip_value": 0.7}], ids=str)
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_hundred_updates_with_overflows_equal_the_textbook(make: Make, clip: dict[str, float], fused: bool) -> None:
    """At a loss scale that grows and falls, weights and optimizer state; theirs is the sequence that docs teach."""
    ours, theirs = _parameters(), _parameters()
    our_optimizer, their_optimizer = make(ours.values(), fused=fused), make(theirs.values(), fused=False, foreach=False)
    update = _update([our_optimizer], ours, **clip)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=7)
    skipped = 0
    for i in range(100):
        scaler.scale(torch.zeros(()))  # torch makes the scale in its first call
        scale = scaler.get_scale()
        overflows = i % 9 == 0
        for parameters in (ours, theirs):
            _set_gradients(parameters, i, scale)
            if overflows:
                gradient = parameters["b"].grad
                assert gradient is not None
                gradient[3] = BAD[i % 3]
        found = update.step(scale)
        scaler.unscale_(their_optimizer)
        norm = torch.stack([p.grad.norm() for p in theirs.values() if p.grad is not None]).norm()
        if "clip_value" in clip:
            nn.utils.clip_grad_value_(theirs.values(), clip["clip_value"])
        if "clip_norm" in clip:
            nn.utils.clip_grad_norm_(theirs.values(), clip["clip_norm"])
        scaler.step(their_optimizer)
        scaler.update()
        skipped += overflows
        assert found.applied is not overflows
        assert found.nonfinite() == (["b"] if overflows else [])
        if not overflows:
            torch.testing.assert_close(found.grad_norm, norm, rtol=3e-7, atol=0)
    assert skipped == 12
    pairs = zip(_snapshot(ours, [our_optimizer]), _snapshot(theirs, [their_optimizer]), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=3e-6, atol=1e-7)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("begun", [True, False], ids=["later", "in the first step"])
@pytest.mark.parametrize("fused", [(True, True), (False, False), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize("place", ["a", "b", "c"])
def test_no_optimizer_of_two_takes_anything_from_a_gradient_that_is_not_finite(
    fused: tuple[bool, bool], place: str, begun: bool, bad: float
) -> None:
    parameters = _parameters()
    optimizers = [
        OPTIMIZERS[0]([parameters["a"]], fused=fused[0]),
        OPTIMIZERS[1]([parameters["b"], parameters["c"]], fused=fused[1]),
    ]
    scale = LossScale.of(ScalerConfig(static_scale=8.0), "cpu")
    update = _update(optimizers, parameters, clip_norm=1.0, scaler=scale)
    if begun:
        _set_gradients(parameters, 0)
        update.step()
    before = _snapshot(parameters, optimizers)
    _set_gradients(parameters, 1)
    gradient = parameters[place].grad
    assert gradient is not None
    gradient.view(-1)[-1] = bad
    found = update.step()
    assert (found.applied, found.loss_scale, found.nonfinite()) == (False, 8.0, [place])
    after = _snapshot(parameters, optimizers)
    assert len(after) == len(before)  # no state was made either
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))

    _set_gradients(parameters, 2)
    expected = {name: p.detach().clone() for name, p in parameters.items()}
    assert update.step().applied
    assert all(p.isfinite().all() and not torch.equal(p, expected[name]) for name, p in parameters.items())


def test_after_a_skipped_first_step_fused_momentum_starts_as_ever() -> None:
    """Told not to step, torch's kernel leaves the buffer that it was to fill as it found the memory."""
    ours, theirs = _parameters(), _parameters()
    make = partial(SGD, lr=0.1, momentum=0.9, dampening=0.5)
    optimizer, plain = make(ours.values(), fused=True), make(theirs.values(), fused=False)
    update = _update([optimizer], ours)
    _set_gradients(ours, 0, float("inf"))
    update.step()
    for i in range(3):
        _set_gradients(ours, i)
        _set_gradients(theirs, i)
        update.step()
        plain.step()
    for a, b in zip(ours.values(), theirs.values(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("make", [*OPTIMIZERS, partial(Adagrad, lr=0.1)])
def test_parameters_of_other_formats_step_too(make: Make, dtype: torch.dtype) -> None:
    ours, theirs = _parameters(dtype), _parameters(dtype)
    optimizer, plain = make(ours.values(), fused=True), make(theirs.values(), fused=False)
    _set_gradients(ours, 0, 4.0)
    _set_gradients(theirs, 0)
    _update([optimizer], ours, clip_norm=1.0).step(4.0)
    nn.utils.clip_grad_norm_(theirs.values(), 1.0)
    plain.step()
    for a, b in zip(ours.values(), theirs.values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12 if dtype is torch.float64 else 1e-2, atol=1e-12)


@pytest.mark.parametrize("shape", [(20_000, 512), (512, 20, 1000), (300_000,)], ids=str)
def test_the_norm_of_a_large_gradient_is_right(shape: tuple[int, ...]) -> None:
    """Torch's own is off by 4e-4 for the first two on the CPU, where it adds up ten million squares in a row."""
    parameter = nn.Parameter(torch.zeros(shape))
    parameter.grad = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found = _update([SGD([parameter], lr=0.0)], {"a": parameter}).step()
    expected = parameter.grad.double().norm()
    torch.testing.assert_close(found.grad_norm.double(), expected, rtol=3e-6, atol=0)
    assert found.norms.shape == (1,)


def test_a_parameter_without_a_gradient_is_left_alone() -> None:
    parameters = _parameters()
    optimizer = AdamW(parameters.values(), lr=0.1, weight_decay=0.5, fused=True)
    update = _update([optimizer], parameters)
    _set_gradients(parameters, 0)
    parameters["b"].grad = None
    before = parameters["b"].detach().clone()
    update.step()
    assert torch.equal(parameters["b"], before)
    assert parameters["b"] not in optimizer.state


def test_flushed_gradients_are_counted_and_rows_that_nobody_used_are_not() -> None:
    table = torch.tensor([[0.0, 0.0, 0.0, 0.0], [1.0, 0.0, 2.0, 3.0]])  # row 0: a token that did not occur
    assert underflow_fraction([table, torch.tensor([0.0, 1.0])]).item() == pytest.approx(2 / 6)
    assert underflow_fraction([torch.zeros(3, 3)]).item() == 0.0


def test_gradients_of_any_shape_are_looked_at() -> None:
    shapes = [(), (0,), (0, 3), (3,), (2, 2, 2)]
    assert underflow_fraction([torch.ones(shape) for shape in shapes]).item() == 0.0
    assert underflow_fraction([torch.tensor(0.0), torch.tensor([0.0, 1.0])]).item() == pytest.approx(1 / 2)


def test_complex_parameters_train() -> None:
    ours, theirs = (nn.Parameter(torch.tensor([1 + 2j, 3 - 1j])) for _ in range(2))
    optimizer, plain = SGD([ours], lr=0.1), SGD([theirs], lr=0.1)
    for parameter in (ours, theirs):
        parameter.grad = torch.tensor([3 + 4j, 0j])
    found = _update([optimizer], {"weight": ours}, clip_norm=1.0).step()
    nn.utils.clip_grad_norm_([theirs], 1.0)
    plain.step()
    assert found.grad_norm.item() == 5.0
    torch.testing.assert_close(ours, theirs)


def test_a_gradient_that_nobody_reduces_is_refused() -> None:
    parameters = _parameters()
    late = nn.Parameter(torch.zeros(2))
    update = _update([SGD([*parameters.values(), late], lr=0.1)], parameters)
    _set_gradients(parameters, 0)
    update.step()
    late.grad = torch.full((2,), float("nan"))
    with pytest.raises(MisuseError, match="unfrozen after wrapping"):
        update.step()
    assert not late.any()


@pytest.mark.parametrize("bad", [False, True])
def test_a_rule_around_a_fused_step_sees_the_divided_gradient_and_no_overflow(bad: bool) -> None:
    class Around(AdamW):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for p in (p for group in self.param_groups for p in group["params"]):
                p.grad.clamp_(-0.1, 0.1)
            super().step()
            torch._foreach_mul_([p.detach() for group in self.param_groups for p in group["params"]], 0.5)

    ours, theirs = _parameters(), _parameters()
    our_optimizer, their_optimizer = Around(ours.values(), fused=True), Around(theirs.values(), fused=False)
    update = _update([our_optimizer], ours, clip_norm=0.5)
    for i in range(3):
        _set_gradients(theirs, i)
        nn.utils.clip_grad_norm_(theirs.values(), 0.5)
        _set_gradients(ours, i, 8.0 * (float("inf") if bad and i == 1 else 1.0))
        update.step(8.0)
        if not (bad and i == 1):
            their_optimizer.step()
    pairs = zip(_snapshot(ours, [our_optimizer]), _snapshot(theirs, [their_optimizer]), strict=True)
    assert all(torch.allclose(one, other, rtol=1e-5, atol=1e-7) for one, other in pairs)
