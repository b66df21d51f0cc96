"""The 29 cases that torch's own tests hold ``GradScaler`` to on a CPU, run with ``LossScaler`` in its place.

They bear the names of ``TestTorchDeviceTypeCPU`` (torch's ``test_torch.py``), less ``test_`` and ``_cpu``, in words of
our own: the same calls and assertions. Each runs with torch's scaler too. 21 hold as they are; the others assert the
scale after a few windows as well, and that differs on purpose: ours grows one update later, as DeepSpeed's does.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD, Adam, AdamW, Optimizer

from distaccum.precision.scaler import LossScaler

INF, NAN = float("inf"), float("nan")
BAD = 2  # of a case's four batches, the one whose gradient is made infinite
Batch = tuple[Tensor, Tensor]
Case = Callable[[Any], float | None]  # takes the scaler's class; gives the last scale if torch's asserts it


def _pair(kind: type[Optimizer] = SGD, **options: Any) -> list[tuple[nn.Sequential, Optimizer]]:
    """Twice the same model, each with an optimizer of its own."""
    first = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    return [(model, kind(model.parameters(), **{"lr": 1.0} | options)) for model in (first, copy.deepcopy(first))]


def _data() -> list[Batch]:
    return [(torch.randn(8, 8), torch.randn(8, 8)) for _ in range(4)]


def _spoil(model: nn.Sequential) -> None:
    gradient = model[1].weight.grad
    assert isinstance(gradient, Tensor)
    gradient.fill_(INF)


def _compared(a: tuple[nn.Module, Optimizer], b: tuple[nn.Module, Optimizer], atol: float) -> None:
    """Weights, gradients and optimizer state."""
    close = partial(torch.testing.assert_close, rtol=1e-5, atol=atol)
    for p, q in zip(a[0].parameters(), b[0].parameters(), strict=True):
        if p.grad is not None or q.grad is not None:
            close(p.grad, q.grad)
        close(p, q)
        state, other = a[1].state[p], b[1].state[q]
        assert state.keys() == other.keys()
        for name, value in state.items():
            close(value, other[name])


class Loop:
    """Four windows of one model and optimizer, scaled and plain; each case says what it does differently."""

    autocast = pickles = False
    atol, every = 1e-7, 1
    overflows = True

    def __init__(self, kind: type[Optimizer] = SGD, **options: Any) -> None:
        self.kind, self.options = kind, options

    def loss(self, model: nn.Module, batch: Batch, scaler: Any) -> Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1]) / self.every

    def between(self, model: nn.Module, optimizer: Optimizer, scaler: Any) -> None:
        """After the backward."""

    def spoiled(self, model: nn.Sequential, i: int) -> None:
        if self.overflows and i == BAD:
            _spoil(model)

    def scaled(self, model: nn.Sequential, optimizer: Optimizer, scaler: Any, data: list[Batch]) -> Any:
        for i, batch in enumerate(data):
            with torch.autocast("cpu", torch.float16, enabled=self.autocast):
                loss = self.loss(model, batch, scaler)
            scaler.scale(loss).backward()
            if scaler.is_enabled():
                self.spoiled(model, i)
            self.between(model, optimizer, scaler)
            if (i + 1) % self.every == 0:
                scaler.step(optimizer)
                scaler.update()
                if i + 1 < len(data):
                    optimizer.zero_grad()
            if self.pickles:
                scaler = pickle.loads(pickle.dumps(scaler))  # noqa: S301
        return scaler

    def plain(self, model: nn.Sequential, optimizer: Optimizer, data: list[Batch], skips: bool) -> None:
        for i, batch in enumerate(data):
            self.loss(model, batch, None).backward()
            self.between(model, optimizer, None)
            if (i + 1) % self.every == 0:
                if not (skips and self.overflows and i == BAD):
                    optimizer.step()
                if i + 1 < len(data):
                    optimizer.zero_grad()

    def __call__(self, Scaler: Any) -> float:  # noqa: N803
        for enabled in (False, True):
            pair, data = _pair(self.kind, **self.options), _data()
            scaler = Scaler("cpu", init_scale=128.0, growth_factor=2.0, growth_interval=1, enabled=enabled)
            self.plain(*pair[0], data, skips=enabled)
            scaler = self.scaled(*pair[1], scaler, data)
            _compared(*pair, atol=self.atol)
            if not enabled:
                assert scaler.get_scale() == 1.0
        return float(scaler.get_scale())


class Autocast(Loop):
    """fp16 against fp32. Of Adam torch asserts that the two differ; here it runs in fp32, where they must not."""

    def __call__(self, Scaler: Any) -> float | None:  # type: ignore[override] # noqa: N803
        self.autocast = self.kind is SGD
        self.atol = 1e-3 if self.autocast else 1e-5
        last = set()
        for self.pickles in (False, True):
            last.add(super().__call__(Scaler))
        assert len(last) == 1
        return last.pop() if self.kind is SGD else None


class Clipping(Loop):
    atol, separately = 1e-5, False

    def between(self, model: nn.Module, optimizer: Optimizer, scaler: Any) -> None:
        factor = 1.0 if scaler is None or self.separately else scaler.get_scale()
        if scaler is not None and self.separately:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.2 * factor)

    def spoiled(self, model: nn.Sequential, i: int) -> None:
        if self.separately:
            super().spoiled(model, i)

    def scaled(self, model: nn.Sequential, optimizer: Optimizer, scaler: Any, data: list[Batch]) -> Any:
        if self.separately:
            return super().scaled(model, optimizer, scaler, data)
        for i, batch in enumerate(data):  # the infinite gradient comes after clipping
            optimizer.zero_grad()
            scaler.scale(self.loss(model, batch, scaler)).backward()
            self.between(model, optimizer, scaler)
            if i == BAD and scaler.is_enabled():
                _spoil(model)
            scaler.step(optimizer)
            scaler.update()
        return scaler


class ClippingSeparateUnscale(Clipping):
    atol, separately = 1e-7, True


class Penalty(Loop):
    """The norm of the gradient, of which a second backward is taken."""

    def loss(self, model: nn.Module, batch: Batch, scaler: Any) -> Tensor:
        loss = super().loss(model, batch, scaler)
        whole, inverse = (loss, 1.0) if scaler is None else (scaler.scale(loss), 1.0 / scaler.get_scale())
        gradients = torch.autograd.grad(whole, list(model.parameters()), create_graph=True)
        return loss + torch.stack([(g * inverse).square().sum() for g in gradients]).sum().sqrt()


class Accumulation(Loop):
    every, overflows = 2, False


def multiple(Scaler: Any) -> float:  # noqa: N803
    """Two models, two optimizers, two losses of both; one optimizer is unscaled by hand."""
    for enabled in (False, True):
        pairs, data = [_pair(), _pair()], _data()
        scaler = Scaler("cpu", init_scale=128.0, growth_factor=2.0, growth_interval=1, enabled=enabled)
        for scaled in (False, True):
            (first, a), (second, b) = (pair[scaled] for pair in pairs)
            for i, (inputs, targets) in enumerate(data):
                a.zero_grad()
                b.zero_grad()
                x, y = first(inputs), second(inputs)
                losses = [nn.functional.mse_loss(o, targets) for o in (0.3 * x + 0.7 * y, 0.6 * x - 0.4 * y)]
                for loss, keep in zip(losses, (True, False), strict=True):
                    (scaler.scale(loss) if scaled else loss).backward(retain_graph=keep)
                bad = i == BAD and enabled
                if not scaled:
                    a.step()
                    if not bad:
                        b.step()
                    continue
                if bad:
                    _spoil(second)
                scaler.unscale_(a)
                scaler.step(a)
                scaler.step(b)
                scaler.update()
        for plain, other in pairs:
            for p, q in zip(plain[0].parameters(), other[0].parameters(), strict=True):
                torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)
    return float(scaler.get_scale())


def pickle_gradscaler(Scaler: Any) -> None:  # noqa: N803
    for used in (True, False):
        scaler = Scaler("cpu", init_scale=3.0, growth_factor=4.0, backoff_factor=0.5, growth_interval=2)
        if used:
            scaler.scale(torch.tensor([4.0]))
            assert scaler._scale.device.type == "cpu"
        copied = pickle.loads(pickle.dumps(scaler))  # noqa: S301
        assert copied.is_enabled()
        assert _settings(copied) == (3.0, 4.0, 0.5, 2, 0)
        assert copied._per_optimizer_states["no such"] == GradScaler("cpu")._per_optimizer_states["no such"]
        if used:
            assert copied.scale(torch.tensor([4.0])) == 12.0


def _settings(scaler: Any) -> tuple[float, float, float, int, int]:
    getters = (scaler.get_scale, scaler.get_growth_factor, scaler.get_backoff_factor, scaler.get_growth_interval)
    return (*(get() for get in getters), scaler._init_growth_tracker)


def state_dict(Scaler: Any) -> None:  # noqa: N803
    for used in (True, False):
        saved = Scaler("cpu", init_scale=3.0, growth_factor=4.0, backoff_factor=0.5, growth_interval=2)
        loaded = Scaler("cpu", init_scale=6.0, growth_factor=7.0, backoff_factor=0.8, growth_interval=1)
        loaded._init_growth_tracker = 7
        if used:
            loaded.scale(torch.full((1,), 4.0))
            assert isinstance(loaded._scale, torch.FloatTensor)
        loaded.load_state_dict(saved.state_dict())
        assert _settings(loaded) == (3.0, 4.0, 0.5, 2, 0)


def _storm(bad: int, dtype: torch.dtype) -> list[Tensor]:
    """Gradients of two types, dense and not, with an infinity in one of them."""
    g = torch.full((20, 20), 4.0, dtype=dtype)
    gradients = [g.clone(), g.clone()[:, :5], g.half(), g.half()]
    if bad >= 0:
        gradients[bad][2, 2] = INF
    return gradients


def unscale(dtype: torch.dtype, Scaler: Any) -> None:  # noqa: N803
    inverse, g = torch.full((1,), 0.25), torch.full((20, 20), 4.0, dtype=dtype)
    kernel = torch._amp_foreach_non_finite_check_and_unscale_
    for value in (4.0, INF, NAN):
        spoiled = g.clone()
        spoiled[2, 2] = value
        for pair in (
            [g.clone(), spoiled.clone()],
            [g.clone().t(), spoiled.clone().t()],
            [g.clone(), spoiled.clone()[:, :5]],
            [spoiled.clone()[:, :5], g.clone()[:, :5]],
        ):
            found = torch.zeros(1)
            kernel(pair, found, inverse)
            assert found.item() == (value != 4.0)
            assert value != 4.0 or all(one.eq(1).all() for one in pair)
    mixed = [g.clone(), g.half()]
    kernel(mixed, torch.zeros(1), inverse)
    assert all(one.eq(1).all() for one in mixed)
    scaler = Scaler("cpu")
    parameters = [torch.empty_like(one) for one in _storm(-1, dtype)]
    optimizer = SGD(parameters, lr=1.0)
    for bad in range(-1, len(parameters)):
        gradients = _storm(bad, dtype)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        found_by_device = scaler._unscale_grads_(optimizer, inverse, torch.zeros(1), True)
        assert sum(one.item() for one in found_by_device.values()) == (bad >= 0)
        assert bad >= 0 or all(one.eq(1).all() for one in gradients)


def unscale_sparse(Scaler: Any) -> None:  # noqa: N803
    scaler, inverse = Scaler("cpu"), torch.full((1,), 0.25)
    apart, twice = torch.tensor([[0, 1, 1], [2, 0, 2]]), torch.tensor([[0, 1, 0], [2, 0, 2]])
    for places, values, dtype, expected in (
        (apart, (16.0, 32.0, 64.0), torch.float32, 0.0),
        (apart, (16.0, 32.0, INF), torch.float32, 1.0),
        (apart, (16.0, 32.0, NAN), torch.float32, 1.0),
        (apart, (16.0, 32.0, 64.0), torch.float16, 0.0),
        (twice, (64000.0, 32.0, 64000.0), torch.float16, 1.0),  # of one place: finite until they are added
    ):
        gradient = torch.sparse_coo_tensor(places, torch.tensor(values), (2, 3), check_invariants=False).to(dtype)
        parameter = torch.zeros_like(gradient)
        parameter.grad = gradient.clone()
        found = scaler._unscale_grads_(SGD([parameter], lr=1.0), inverse, torch.zeros(1), dtype is torch.float16)[
            inverse.device
        ]
        assert found.item() == expected
        if not expected:
            torch.testing.assert_close(parameter.grad.to_dense(), (gradient / 4).to_dense())


def update_scale(Scaler: Any) -> None:  # noqa: N803
    """Of torch's operator alone: two updates, of which the second grows, and an overflow."""
    scale, tracker = torch.full((1,), 4.0), torch.zeros(1, dtype=torch.int32)
    for found, expected in ((0.0, (4.0, 1)), (0.0, (8.0, 0)), (1.0, (2.0, 0))):
        torch._amp_update_scale_(scale, tracker, torch.full((1,), found), 2.0, 0.25, 2)
        assert (scale.item(), tracker.item()) == expected


def _variants(kind: type[Optimizer]) -> Iterator[dict[str, Any]]:
    yield from ({}, {"foreach": True}, {"fused": True}, {"weight_decay": 0.1}, {"maximize": True})
    yield {"momentum": 0.9, "dampening": 0.5} if kind is SGD else {"amsgrad": True, "fused": True}


def params_invalidated(kind: type[Optimizer], Scaler: Any) -> None:  # noqa: N803
    """What the caller does to gradients after ``unscale_`` is his: the step takes them, whatever they have become."""
    for options in _variants(kind):
        (model, optimizer), _ = _pair(kind, **options)
        scaler = Scaler("cpu", init_scale=128.0)
        for inputs, targets in _data():
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = nn.functional.mse_loss(model(inputs), targets)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            for j, parameter in enumerate(model.parameters()):
                assert parameter.grad is not None
                parameter.grad.fill_(INF if j % 2 else NAN)
            scaler.step(optimizer)
            scaler.update()
        assert not any(parameter.isfinite().all() for parameter in model.parameters())


def scale_will_not_overflow(Scaler: Any) -> None:  # noqa: N803
    model = nn.Linear(5, 1)
    optimizer, scaler = Adam(model.parameters()), Scaler("cpu", growth_interval=1, growth_factor=2**4, init_scale=1e38)
    loss = (model(torch.randn(1, 5)) - 1e-30 * torch.randn(1, 1)).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler._scale.isfinite()


def pass_itself(Scaler: Any) -> None:  # noqa: N803
    """Optimizers that unscale themselves: by the scaler, which is deprecated, or by two attributes."""

    class Fused(Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {})
            self._step_supports_amp_scaling = True

    class ByScaler(Fused):
        def step(self, closure: Any = None, *, grad_scaler: Any = None) -> None:  # type: ignore[override]
            assert isinstance(grad_scaler, GradScaler)
            assert not hasattr(self, "grad_scale")
            assert not hasattr(self, "found_inf")

    class ByAttributes(Fused):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            assert isinstance(self.grad_scale, Tensor)  # type: ignore[attr-defined]
            assert isinstance(self.found_inf, Tensor)  # type: ignore[attr-defined]

    model, scaler = nn.Linear(4, 1), Scaler("cpu", init_scale=2.0)
    with torch.autocast("cpu", torch.float16):
        loss = model(torch.randn(4, 4)).mean()
    scaler.scale(loss).backward()
    with pytest.warns(FutureWarning, match="stop passing itself"):
        scaler.step(ByScaler(model.parameters()))
    scaler.step(ByAttributes(model.parameters()))
    scaler.update()


def deprecated_warning(Scaler: Any) -> None:  # noqa: N803
    """Of the older name of torch's; the new one, and ours, give none."""
    with pytest.warns(FutureWarning, match=r"torch.cpu.amp.GradScaler\(args...\)` is deprecated"):
        torch.cpu.amp.GradScaler(init_scale=2.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Scaler("cpu", init_scale=2.0)


KINDS: tuple[type[Optimizer], ...] = (Adam, AdamW, SGD)
FORMS: dict[str, dict[str, Any]] = {
    "foreach_None_fused_None": {},
    "foreach_True_fused_None": {"foreach": True},
    "foreach_None_fused_True": {"fused": True},
}
INVALIDATED = "params_invalidated_with_grads_invalidated"
CASES: dict[str, Case] = {
    "pickle_gradscaler": pickle_gradscaler,
    "grad_scaling_unscale_float32": partial(unscale, torch.float32),
    "grad_scaling_unscale_float64": partial(unscale, torch.float64),
    "grad_scaling_update_scale_float32": update_scale,
    "grad_scaling_unscale_sparse_float32": unscale_sparse,
    "grad_scaling_state_dict": state_dict,
    **{
        f"grad_scaling_autocast_{form}_{kind.__name__}_float32": Autocast(kind, **options)
        for form, options in FORMS.items()
        for kind in KINDS
    },
    **{
        f"{INVALIDATED}_{how}_{kind.__name__}_float32": partial(params_invalidated, kind)
        for how in ("between_unscale_and_step", "and_graph_partition")  # a setting of a compiler that is not called
        for kind in KINDS
    },
    "grad_scale_will_not_overflow": scale_will_not_overflow,
    "grad_scaling_clipping": Clipping(),
    "grad_scaling_clipping_separate_unscale": ClippingSeparateUnscale(),
    "grad_scaling_penalty": Penalty(),
    "grad_scaling_accumulation": Accumulation(),
    "grad_scaling_multiple": multiple,
    "grad_scaler_pass_itself": pass_itself,
    "grad_scaler_deprecated_warning": deprecated_warning,
}
# The last scale, torch's and ours, of windows that grow it from 128 at every update (``growth_interval=1``): three
# updates and an overflow, or two updates. Ours lets one update pass at the start and after an overflow.
DIFFERS_ON_PURPOSE = {
    **{f"grad_scaling_autocast_{form}_SGD_float32": (512.0, 128.0) for form in FORMS},
    "grad_scaling_clipping": (512.0, 128.0),
    "grad_scaling_clipping_separate_unscale": (512.0, 128.0),
    "grad_scaling_penalty": (512.0, 128.0),
    "grad_scaling_multiple": (512.0, 128.0),
    "grad_scaling_accumulation": (512.0, 256.0),
}


@pytest.mark.parametrize("Scaler", [LossScaler, GradScaler])
@pytest.mark.parametrize("name", CASES)
def test_torchs_own_case_holds(name: str, Scaler: Any) -> None:  # noqa: N803
    torch.manual_seed(20)
    last = CASES[name](Scaler)
    torchs, ours = DIFFERS_ON_PURPOSE.get(name, (None, None))
    assert last == (torchs if Scaler is GradScaler else ours)


def test_21_of_29_hold_as_they_are_and_the_others_but_for_when_the_scale_grows() -> None:
    assert (len(CASES), len(CASES.keys() - DIFFERS_ON_PURPOSE)) == (29, 21)
    assert DIFFERS_ON_PURPOSE.keys() <= CASES.keys()
