"""``LossScaler`` in torch's place: 23 cases of torch's own tests for ``GradScaler`` on a CPU, and its callers' calls.

The cases bear the names of ``TestTorchDeviceTypeCPU`` (torch's ``test_torch.py``), less ``test_`` and ``_cpu``, in
words of our own: the same calls and assertions, but for those of torch's operators alone. Each runs with torch's scaler
too. 15 hold; the others assert the scale after a few windows, which ours grows one update later, as DeepSpeed's.
"""

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

from distaccum.errors import ConfigError
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
        assert loaded._get_growth_tracker() == 0
        with pytest.raises(RuntimeError, match="empty"):
            loaded.load_state_dict({})


def _storm(bad: int, dtype: torch.dtype) -> list[Tensor]:
    """Gradients of two types, dense and not, with an infinity in one of them."""
    g = torch.full((20, 20), 4.0, dtype=dtype)
    gradients = [g.clone(), g.clone()[:, :5], g.half(), g.half()]
    if bad >= 0:
        gradients[bad][2, 2] = INF
    return gradients


def unscale(dtype: torch.dtype, Scaler: Any) -> None:  # noqa: N803
    inverse = torch.full((1,), 0.25)
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


def pass_itself(Scaler: Any) -> None:  # noqa: N803
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

    parameter, scaler = nn.Parameter(torch.ones(2)), Scaler("cpu", init_scale=2.0)
    second = ByAttributes([parameter])
    with torch.autocast("cpu", torch.float16):
        loss = (3 * parameter).sum()
    scaler.scale(loss).backward()
    with pytest.warns(FutureWarning, match="stop passing itself"):
        scaler.step(ByScaler([parameter]))
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [6.0, 6.0]  # its own to unscale
    scaler.step(second)
    scaler.update()
    assert seen[0] is scaler
    assert isinstance(scaler, GradScaler)
    scale, found = seen[1]
    assert (parameter.grad / scale).tolist() == [3.0, 3.0]
    assert found.item() == 0.0
    assert not hasattr(second, "grad_scale")


KINDS: tuple[type[Optimizer], ...] = (Adam, AdamW, SGD)
FORMS: dict[str, dict[str, Any]] = {
    "foreach_None_fused_None": {},
    "foreach_True_fused_None": {"foreach": True},
    "foreach_None_fused_True": {"fused": True},
}
INVALIDATED = "params_invalidated_with_grads_invalidated_between_unscale_and_step"
CASES: dict[str, Case] = {
    "pickle_gradscaler": pickle_gradscaler,
    "grad_scaling_unscale_float32": partial(unscale, torch.float32),
    "grad_scaling_unscale_float64": partial(unscale, torch.float64),
    "grad_scaling_unscale_sparse_float32": unscale_sparse,
    "grad_scaling_state_dict": state_dict,
    **{
        f"grad_scaling_autocast_{form}_{kind.__name__}_float32": Autocast(kind, **options)
        for form, options in FORMS.items()
        for kind in KINDS
    },
    **{f"{INVALIDATED}_{kind.__name__}_float32": partial(params_invalidated, kind) for kind in KINDS},
    "grad_scaling_clipping": Clipping(),
    "grad_scaling_clipping_separate_unscale": ClippingSeparateUnscale(),
    "grad_scaling_penalty": Penalty(),
    "grad_scaling_accumulation": Accumulation(),
    "grad_scaling_multiple": multiple,
    "grad_scaler_pass_itself": pass_itself,
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


def test_15_of_23_hold_as_they_are_and_the_others_but_for_when_the_scale_grows() -> None:
    assert (len(CASES), len(CASES.keys() - DIFFERS_ON_PURPOSE)) == (23, 15)
    assert DIFFERS_ON_PURPOSE.keys() <= CASES.keys()


# How a scaler is called by those who have torch's, accelerate, Lightning and transformers among them.
both = pytest.mark.parametrize("Scaler", [LossScaler, GradScaler])


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
@pytest.mark.parametrize("between", ["unscale and step", "step and update"])
def test_params_invalidated(between: str, Scaler: Any) -> None:  # noqa: N803
    """Parameters of other shapes and gradients of None in the middle of a window."""
    (model, optimizer), _ = _pair(lr=0.1)
    scaler = Scaler("cpu", init_scale=128.0)
    for batch in _data():
        optimizer.zero_grad()
        scaler.scale(Loop().loss(model, batch, scaler)).backward()
        scaler.unscale_(optimizer)
        if between == "step and update":
            scaler.step(optimizer)
        for parameter in model.parameters():
            parameter.grad = None
        if between == "unscale and step":
            scaler.step(optimizer)
        scaler.update()
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_scale_that_the_caller_set_on_the_optimizer_is_taken_out_too() -> None:
    """Torch multiplies it with the loss scale; ours set it to None, and stepped on a gradient 4 times too large."""
    pair, data = _pair(lr=0.1, fused=True), _data()
    for (model, optimizer), Scaler in zip(pair, (GradScaler, LossScaler), strict=True):  # noqa: N806
        scaler = Scaler("cpu", init_scale=16.0)
        for batch in data:
            optimizer.zero_grad()
            scaler.scale(4 * Loop().loss(model, batch, scaler)).backward()
            optimizer.grad_scale = torch.tensor(4.0)  # type: ignore[attr-defined]
            scaler.step(optimizer)
            scaler.update()
    for a, b in zip(*(model.parameters() for model, _ in pair), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


class Telling(SGD):
    def step(self, closure: Any = None, *, word: str = "") -> str:  # type: ignore[override]
        super().step()
        return word


@both
@pytest.mark.parametrize("enabled", [True, False])
def test_a_steps_arguments_are_the_optimizers_and_what_it_returns_comes_back(enabled: bool, Scaler: Any) -> None:  # noqa: N803
    """accelerate passes ``closure`` on, which is None."""
    parameter = nn.Parameter(torch.ones(1))
    optimizer, scaler = Telling([parameter], lr=0.1), Scaler("cpu", enabled=enabled)
    for gradient, expected in ((1.0, "done"), (INF, None if enabled else "done")):
        parameter.grad = torch.full_like(parameter, gradient)
        scaler.scale(torch.ones(()))
        assert scaler.step(optimizer, None, word="done") == expected
        scaler.update()
    if enabled:
        with pytest.raises(RuntimeError, match="losure"):
            scaler.step(optimizer, closure=lambda: 0.0)


@both
def test_one_that_is_not_enabled_does_nothing(Scaler: Any) -> None:  # noqa: N803
    scaler, ((model, optimizer), _) = Scaler("cpu", enabled=False), _pair()
    loss = Loop().loss(model, _data()[0], scaler)
    assert not scaler.is_enabled()
    assert scaler.scale(loss) is loss
    loss.backward()
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
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
def test_a_new_scale_and_arguments_by_position(Scaler: Any) -> None:  # noqa: N803
    scaler = Scaler("cpu", 8.0)
    assert scaler.get_scale() == 8.0
    scaler.scale(torch.ones(()))
    for value in (2.0, torch.tensor(2.0)):
        scaler.update(4.0)
        scaler.update(value)
        assert scaler.get_scale() == 2.0
    for wrong in (torch.ones(2), torch.ones((), requires_grad=True)):
        with pytest.raises(AssertionError, match="new_scale should be"):
            scaler.update(wrong)
    for factor in ("growth_factor", "backoff_factor"):
        with pytest.raises(AssertionError, match="factor must be"):
            Scaler("cpu", **{factor: 1.0})
    assert LossScaler("cpu", process_group=None).process_group is None  # named as torch's


@pytest.mark.parametrize("kind", [SGD, Adam])
def test_in_accelerates_optimizer_it_trains_and_skips(kind: Any) -> None:
    """``AcceleratedOptimizer`` asks by a patched step whether the update was applied."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("accelerate").Accelerator(cpu=True)
        from accelerate.optimizer import AcceleratedOptimizer  # noqa: PLC0415
    pair, data, scaler = _pair(kind, lr=0.1), _data(), LossScaler("cpu", init_scale=128.0)
    Loop().plain(*pair[0], data, skips=True)
    model, own = pair[1]
    optimizer, skipped = AcceleratedOptimizer(own, scaler=scaler), []
    for i, batch in enumerate(data):
        optimizer.zero_grad()
        scaler.scale(Loop().loss(model, batch, scaler)).backward()
        if i == BAD:
            _spoil(model)
        optimizer.step()
        skipped.append(optimizer.step_was_skipped)
    assert skipped == [False, False, True, False]
    _compared(*pair, atol=1e-7)


def test_in_lightnings_precision_plugin_it_trains_and_skips() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        amp = pytest.importorskip("lightning.fabric.plugins.precision.amp")
    pair, data, scaler = _pair(lr=0.1), _data(), LossScaler("cpu", init_scale=128.0)
    Loop().plain(*pair[0], data, skips=True)
    model, optimizer = pair[1]
    plugin = amp.MixedPrecision("16-mixed", "cpu", scaler=scaler)
    for i, batch in enumerate(data):
        optimizer.zero_grad()
        plugin.backward(Loop().loss(model, batch, scaler), model)
        if i == BAD:
            _spoil(model)
        plugin.optimizer_step(optimizer)
    assert plugin.state_dict() == scaler.state_dict()
    plugin.load_state_dict(plugin.state_dict())
    _compared(*pair, atol=1e-7)
