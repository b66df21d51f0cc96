"""``LossScaler`` in place of torch's scalers: what its callers do, beside torch's own.

The cases that torch's own tests have are in ``test_torchs_cases.py``.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD, Adam, AdamW, Optimizer

from distaccum.errors import ConfigError
from distaccum.precision.scaler import LossScaler

both = pytest.mark.parametrize("Scaler", [LossScaler, GradScaler])
INF, NAN = float("inf"), float("nan")


class Case:
    """Four batches, of which the third gives an infinite gradient, and a model with its optimizer."""

    bad = 2

    def __init__(self, optimizer: type[Optimizer] = SGD, **options: Any) -> None:
        torch.manual_seed(0)
        self.models = [nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(2)]
        self.optimizers = [optimizer(model.parameters(), lr=0.1, **options) for model in self.models]
        self.data = [(torch.randn(8, 8), torch.randn(8, 8)) for _ in range(4)]

    def loss(self, batch: tuple[Tensor, Tensor], which: int = 0) -> Tensor:
        return nn.functional.mse_loss(self.models[which](batch[0]), batch[1])

    def spoil(self, which: int = 0) -> None:
        gradient = next(self.models[which].parameters()).grad
        assert gradient is not None
        gradient.fill_(INF)

    @property
    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for model in self.models for p in model.parameters()]


def autocast(case: Case, scaler: Any, scales: bool) -> Any:
    for i, batch in enumerate(case.data):
        case.optimizers[0].zero_grad()
        loss = case.loss(batch)
        if not scales:
            loss.backward()
            if i != case.bad or not scaler.is_enabled():
                case.optimizers[0].step()
            continue
        scaler.scale(loss).backward()
        if i == case.bad and scaler.is_enabled():
            case.spoil()
        scaler.step(case.optimizers[0])
        scaler.update()
        scaler = pickle.loads(pickle.dumps(scaler))  # noqa: S301
    return scaler


@both
@pytest.mark.parametrize("kind", [SGD, Adam, AdamW])
@pytest.mark.parametrize("separately", [True, False], ids=["unscale_ and step", "step"])
def test_autocast_fused_optimizers(kind: Any, separately: bool, Scaler: Any) -> None:  # noqa: N803
    fused, plain = Case(kind, fused=True), Case(kind)
    scalers = [Scaler("cpu", init_scale=128.0) for _ in range(2)]
    for case, scaler in zip((fused, plain), scalers, strict=True):
        for batch in case.data:
            case.optimizers[0].zero_grad()
            scaler.scale(case.loss(batch)).backward()
            if separately:
                scaler.unscale_(case.optimizers[0])
            scaler.step(case.optimizers[0])
            scaler.update()
    for a, b in zip(fused.weights, plain.weights, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@both
def test_scale(Scaler: Any) -> None:  # noqa: N803
    scaler = Scaler("cpu", init_scale=2.0)
    four = torch.full((1,), 4.0)
    first, second, third = scaler.scale((four, (four, four), [four, (four, four)]))
    found = [first, *second, third[0], *third[1]]
    assert [one.item() for one in found] == [8.0] * 6
    assert scaler._scale.device == four.device
    assert (type(second), type(third)) == (tuple, list)
    for wrong in (1.0, None):
        with pytest.raises(ValueError, match="outputs must be a Tensor or an iterable of Tensors"):
            scaler.scale(wrong)


@both
@pytest.mark.parametrize("used", [True, False], ids=["used", "new"])
def test_state_dict(used: bool, Scaler: Any) -> None:  # noqa: N803
    saved = Scaler("cpu", init_scale=3.0, growth_factor=4.0, backoff_factor=0.5, growth_interval=2)
    loaded = Scaler("cpu", init_scale=6.0, growth_factor=7.0, backoff_factor=0.8, growth_interval=1)
    if used:
        loaded.scale(torch.ones(1))
    loaded.load_state_dict(saved.state_dict())
    assert loaded.get_scale() == 3.0
    assert (loaded.get_growth_factor(), loaded.get_backoff_factor(), loaded.get_growth_interval()) == (4.0, 0.5, 2)
    assert loaded._get_growth_tracker() == 0
    with pytest.raises(RuntimeError, match="empty"):
        loaded.load_state_dict({})


@both
def test_scaler_pass_itself(Scaler: Any) -> None:  # noqa: N803
    """Optimizers that unscale themselves: by the scaler, which is deprecated, or by two attributes."""
    seen: list[Any] = []

    class Fused(Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {})
            self._step_supports_amp_scaling = True

    class ByScaler(Fused):
        def step(self, closure: Any = None, *, grad_scaler: Any = None) -> None:  # type: ignore[override]
            assert not hasattr(self, "grad_scale")
            assert not hasattr(self, "found_inf")
            seen.append(grad_scaler)

    class ByAttributes(Fused):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            seen.append((self.grad_scale, self.found_inf))  # type: ignore[attr-defined]

    parameter = nn.Parameter(torch.ones(2))
    first, second = ByScaler([parameter]), ByAttributes([parameter])
    scaler = Scaler("cpu", init_scale=2.0)
    scaler.scale((3 * parameter).sum()).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scaler.step(first)
    assert parameter.grad.tolist() == [6.0, 6.0]  # its own to unscale
    scaler.step(second)
    scaler.update()
    assert seen[0] is scaler
    scale, found = seen[1]
    assert (parameter.grad / scale).tolist() == [3.0, 3.0]
    assert found.item() == 0.0
    assert not hasattr(second, "grad_scale")


@both
@pytest.mark.parametrize("between", ["unscale and step", "step and update"])
def test_params_invalidated(between: str, Scaler: Any) -> None:  # noqa: N803
    """Parameters of other shapes and gradients of None in the middle of a window."""
    case = Case()
    scaler = Scaler("cpu", init_scale=128.0)
    optimizer = case.optimizers[0]
    for batch in case.data:
        optimizer.zero_grad()
        scaler.scale(case.loss(batch)).backward()
        scaler.unscale_(optimizer)
        if between == "step and update":
            scaler.step(optimizer)
        for parameter in case.models[0].parameters():
            parameter.grad = None
        if between == "unscale and step":
            scaler.step(optimizer)
        scaler.update()
    assert all(p.isfinite().all() for p in case.weights)


def test_a_scale_that_the_caller_set_on_the_optimizer_is_taken_out_too() -> None:
    """Torch multiplies it with the loss scale; ours set it to None, and stepped on a gradient 4 times too large."""
    weights = []
    for Scaler in (GradScaler, LossScaler):  # noqa: N806
        case = Case(SGD, fused=True)
        scaler = Scaler("cpu", init_scale=16.0)
        for batch in case.data:
            case.optimizers[0].zero_grad()
            scaler.scale(4 * case.loss(batch)).backward()
            case.optimizers[0].grad_scale = torch.tensor(4.0)  # type: ignore[attr-defined]
            scaler.step(case.optimizers[0])
            scaler.update()
        weights.append(case.weights)
    for a, b in zip(*weights, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


# How accelerate, Lightning and transformers call a scaler, and what they ask it.


@both
def test_the_arguments_of_a_step_are_the_optimizers(Scaler: Any) -> None:  # noqa: N803
    """accelerate passes ``closure`` on, which is None."""
    case = Case()
    before = case.weights
    scaler = Scaler("cpu", init_scale=2.0)
    scaler.scale(case.loss(case.data[0])).backward()
    scaler.step(case.optimizers[0], None)
    scaler.update()
    assert not torch.equal(case.weights[0], before[0])
    with pytest.raises(RuntimeError, match="losure"):
        scaler.step(case.optimizers[0], closure=lambda: 0.0)


@both
@pytest.mark.parametrize("enabled", [True, False])
def test_what_a_step_returns_comes_back(enabled: bool, Scaler: Any) -> None:  # noqa: N803
    class Telling(SGD):
        def step(self, closure: Any = None, *, word: str = "") -> str:  # type: ignore[override]
            super().step()
            return word

    parameter = nn.Parameter(torch.ones(1))
    optimizer, scaler = Telling([parameter], lr=0.1), Scaler("cpu", enabled=enabled)
    for gradient, expected in ((1.0, "done"), (INF, None if enabled else "done")):
        parameter.grad = torch.full_like(parameter, gradient)
        scaler.scale(torch.ones(()))
        assert scaler.step(optimizer, word="done") == expected
        scaler.update()


@both
def test_one_that_is_not_enabled_does_nothing(Scaler: Any) -> None:  # noqa: N803
    scaler, case = Scaler("cpu", enabled=False), Case()
    loss = case.loss(case.data[0])
    assert not scaler.is_enabled()
    assert scaler.scale(loss) is loss
    loss.backward()
    scaler.unscale_(case.optimizers[0])
    scaler.unscale_(case.optimizers[0])
    scaler.step(case.optimizers[0])
    scaler.update()
    scaler.update(4.0)
    scaler.load_state_dict({"scale": 2.0})
    assert (scaler.get_scale(), scaler.state_dict()) == (1.0, {})
    assert not pickle.loads(pickle.dumps(scaler)).is_enabled()  # noqa: S301
    assert not copy.deepcopy(scaler).is_enabled()


def test_not_enabled_it_asks_for_no_gpu_and_enabled_it_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    assert LossScaler("cuda", enabled=False).get_scale() == 1.0
    with pytest.raises(ConfigError, match="device=cuda: there is no such device here"):
        LossScaler("cuda")


@both
def test_a_new_scale(Scaler: Any) -> None:  # noqa: N803
    scaler = Scaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    for value in (2.0, torch.tensor(2.0)):
        scaler.update(4.0)
        scaler.update(value)
        assert scaler.get_scale() == 2.0
    for wrong in (torch.ones(2), torch.ones((), requires_grad=True)):
        with pytest.raises(AssertionError, match="new_scale should be"):
            scaler.update(wrong)


@both
def test_positional_arguments(Scaler: Any) -> None:  # noqa: N803
    assert Scaler("cpu", 32.0).get_scale() == 32.0
    for wrong in ({"growth_factor": 1.0}, {"backoff_factor": 1.0}):
        with pytest.raises(AssertionError, match="factor must be"):
            Scaler("cpu", **wrong)


def test_the_process_group_is_named_as_torchs() -> None:
    assert LossScaler("cpu", process_group=None).process_group is None


@pytest.mark.parametrize("kind", [SGD, Adam])
def test_in_accelerates_optimizer_it_trains_and_skips(kind: Any) -> None:
    """``AcceleratedOptimizer`` asks by a patched step whether the update was applied."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        accelerate = pytest.importorskip("accelerate")
        accelerator = accelerate.Accelerator(cpu=True)
        from accelerate.optimizer import AcceleratedOptimizer  # noqa: PLC0415
    del accelerator
    plain, scaled = Case(kind), Case(kind)
    scaler = LossScaler("cpu", init_scale=128.0)
    autocast(plain, scaler, False)
    optimizer, skipped = AcceleratedOptimizer(scaled.optimizers[0], scaler=scaler), []
    for i, batch in enumerate(scaled.data):
        optimizer.zero_grad()
        scaler.scale(scaled.loss(batch)).backward()
        if i == scaled.bad:
            scaled.spoil()
        optimizer.step()
        skipped.append(optimizer.step_was_skipped)
    assert skipped == [False, False, True, False]
    for a, b in zip(scaled.weights, plain.weights, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_in_lightnings_precision_plugin_it_trains_and_skips() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        amp = pytest.importorskip("lightning.fabric.plugins.precision.amp")
    plain, scaled = Case(), Case()
    scaler = LossScaler("cpu", init_scale=128.0)
    autocast(plain, scaler, False)
    plugin = amp.MixedPrecision("16-mixed", "cpu", scaler=scaler)
    for i, batch in enumerate(scaled.data):
        scaled.optimizers[0].zero_grad()
        plugin.backward(scaled.loss(batch), scaled.models[0])
        if i == scaled.bad:
            scaled.spoil()
        plugin.optimizer_step(scaled.optimizers[0])
    assert plugin.state_dict() == scaler.state_dict()
    plugin.load_state_dict(plugin.state_dict())
    for a, b in zip(scaled.weights, plain.weights, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
