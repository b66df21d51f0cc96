"""The loss scaler: each of torch's defects beside its own, and DeepSpeed's rule of when the scale moves.

A test that takes ``Scaler`` runs with torch's class as well, which is expected to fail: where pytest reports XPASS, the
torch that is installed has mended that defect. What needs two ranks is in ``tests/distributed/test_overflow.py``.
"""

import copy
import math
import random
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import SGD, Adam, AdamW, Optimizer

from distaccum.distributed.world import World
from distaccum.precision.scaler import LossScaler
from distaccum.testing import single_process_world
from distaccum.testing.counters import OperationCounter

both = pytest.mark.parametrize(
    "Scaler",
    [
        pytest.param(LossScaler, id="ours"),
        pytest.param(
            ShardedGradScaler,
            id="torch's",
            marks=pytest.mark.xfail(strict=False, raises=(AssertionError, RuntimeError), reason="a defect of torch's"),
        ),
    ],
)
INF, NAN = float("inf"), float("nan")
FIVE = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}


@pytest.fixture(scope="module")
def group() -> Iterator[World]:
    """A gloo group of one for all of them: torch's sharded scaler cannot do without."""
    with single_process_world() as world:
        yield world


def _parameter() -> nn.Parameter:
    return nn.Parameter(torch.tensor([1.0, -2.0]))


def _backward(scaler: Any, *parameters: nn.Parameter, gradient: float = 1.0) -> None:
    """As the backward of a scaled loss leaves it."""
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, gradient) * scaler.scale(torch.ones(()))


def _window(scaler: Any, optimizer: Optimizer, parameter: nn.Parameter, gradient: float = 1.0) -> None:
    _backward(scaler, parameter, gradient=gradient)
    scaler.step(optimizer)
    scaler.update()


@both
@pytest.mark.parametrize("kind", [Adam, AdamW])
def test_a_fused_optimizer_steps_after_unscale(kind: Any, Scaler: Any, group: World) -> None:  # noqa: N803
    """pytorch#140514: the kernel wants a 0-dim ``found_inf``, and torch's has shape ``(1,)``."""
    scaler, parameter, plain = Scaler("cpu", init_scale=8.0), _parameter(), _parameter()
    optimizer, reference = kind([parameter], lr=0.1, fused=True), kind([plain], lr=0.1)
    for _ in range(3):
        _backward(scaler, parameter)
        scaler.unscale_(optimizer)
        assert parameter.grad is not None
        assert parameter.grad.tolist() == [1.0, 1.0]
        scaler.step(optimizer)
        scaler.update()
        plain.grad = torch.ones_like(plain)
        reference.step()
    torch.testing.assert_close(parameter, plain)


@both
def test_the_device_is_asked_for_or_the_scaler_is_on(Scaler: Any) -> None:  # noqa: N803
    """Torch's default is ``cuda``, which without a GPU switches it off with a warning, and trains unscaled."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            scaler = Scaler()
        except TypeError as error:
            assert "device" in str(error)  # noqa: PT017  either way will do
            return
    assert scaler.is_enabled()


@both
def test_the_scale_has_a_ceiling(Scaler: Any, group: World) -> None:  # noqa: N803
    scaler, parameter = Scaler("cpu", init_scale=2.0**16, growth_interval=1), _parameter()
    optimizer = SGD([parameter], lr=0.1)
    for _ in range(150):
        _window(scaler, optimizer, parameter, gradient=0.0)
    assert math.isfinite(scaler.get_scale())
    if isinstance(scaler, LossScaler):
        assert scaler.get_scale() == 2.0**24


@both
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_loss_in_16_bits_is_not_rounded_back(Scaler: Any, dtype: torch.dtype) -> None:  # noqa: N803
    scaler = Scaler("cpu", init_scale=2.0**16)
    loss, other = torch.tensor(100.0, dtype=dtype), torch.tensor([3.0], dtype=torch.float64)
    scaled = scaler.scale(loss)
    assert scaled.item() == 100 * 2.0**16
    assert scaled.dtype is torch.float32
    nested = scaler.scale([loss, (other, loss)])
    assert (nested[0].item(), nested[1][0].item(), nested[1][1].item()) == (6553600.0, 196608.0, 6553600.0)
    assert nested[1][0].dtype is torch.float64
    assert isinstance(nested[1], tuple)


@both
def test_after_200_overflows_a_good_window_trains(Scaler: Any, group: World) -> None:  # noqa: N803
    """Torch's scale is 0 by then: the next gradients are 0/0, nothing is found in them, and the optimizer steps."""
    scaler, parameter = Scaler("cpu"), _parameter()
    optimizer = SGD([parameter], lr=0.1)
    for _ in range(200):
        _window(scaler, optimizer, parameter, gradient=INF)
    assert parameter.tolist() == [1.0, -2.0]
    scale = scaler.get_scale()
    _window(scaler, optimizer, parameter)
    assert parameter.tolist() == pytest.approx([0.9, -2.1])
    assert scale == 1.0


@both
@pytest.mark.parametrize("unscales", [False, True], ids=["step", "unscale_ and step"])
def test_a_fused_optimizer_whose_first_step_overflows_starts_as_ever(
    Scaler: Any,  # noqa: N803
    unscales: bool,
    group: World,
) -> None:
    """Told not to step, SGD's kernel leaves the momentum that it was to set as it found the memory."""
    scaler, parameter, plain = Scaler("cpu", init_scale=8.0), _parameter(), _parameter()
    settings = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}
    optimizer, reference = SGD([parameter], **settings, fused=True), SGD([plain], **settings)
    for gradient in (INF, 1.0, 2.0):
        _backward(scaler, parameter, gradient=gradient)
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if gradient == INF:
            assert not optimizer.state_dict()["state"]  # nothing that a kernel could have left unset
            assert parameter.tolist() == [1.0, -2.0]
            continue
        plain.grad = torch.full_like(plain, gradient)
        reference.step()
    torch.testing.assert_close(parameter, plain)


def _two_optimizers(
    scaler: Any, fused: tuple[bool, bool], bad: int, value: float
) -> tuple[list[list[float]], list[list[float]], list[nn.Parameter]]:
    """One good window, and one with ``value`` in the gradient of one of them: the weights after each, and a third."""
    parameters = [_parameter(), _parameter()]
    makers = (AdamW, lambda p, **options: SGD(p, lr=0.1, momentum=0.9, **options))
    optimizers = [make([p], fused=on) for make, p, on in zip(makers, parameters, fused, strict=True)]
    seen = []
    for window in range(3):
        _backward(scaler, *parameters)
        gradient = parameters[bad].grad
        assert gradient is not None
        if window == 1:
            gradient[1] = value
        scaler.step(*optimizers)
        scaler.update()
        seen.append([p.tolist() for p in parameters])
    return seen[0], seen[1], parameters


@pytest.mark.parametrize("fused", [(False, False), (True, True), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_two_optimizers_step_together_or_not_at_all(
    fused: tuple[bool, bool], bad: int, value: float, group: World
) -> None:
    scaler = LossScaler("cpu", init_scale=8.0)
    before, after, parameters = _two_optimizers(scaler, fused, bad, value)
    assert after == before
    assert scaler.get_scale() == 4.0
    assert all(p.isfinite().all() and p.tolist() != old for p, old in zip(parameters, before, strict=True))


def test_unscaled_together_they_decide_together_also_when_stepped_apart(group: World) -> None:
    scaler, a, b = LossScaler("cpu"), _parameter(), _parameter()
    optimizers = [SGD([a], lr=0.1), AdamW([b], lr=0.1, fused=True)]
    _backward(scaler, a, b)
    assert b.grad is not None
    b.grad[0] = NAN
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert (a.tolist(), b.tolist()) == ([1.0, -2.0], [1.0, -2.0])
    assert scaler.get_scale() == 2.0**15


def test_calls_out_of_their_order_are_refused(group: World) -> None:
    scaler, parameter = LossScaler("cpu"), _parameter()
    optimizer = SGD([parameter], lr=0.1)
    _backward(scaler, parameter)
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="already"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    for call in (scaler.step, scaler.unscale_):
        with pytest.raises(RuntimeError, match=r"since the last update\(\)"):
            call(optimizer)
    assert parameter.tolist() == pytest.approx([0.9, -2.1])  # once
    scaler.update()
    with pytest.raises(AssertionError, match="no gradient was unscaled"):
        scaler.update()
    scaler.update(4.0)
    assert scaler.get_scale() == 4.0


def test_a_parameter_without_a_gradient_stays_and_the_rest_steps(group: World) -> None:
    scaler, used, unused = LossScaler("cpu"), _parameter(), _parameter()
    optimizers = [SGD([used], lr=0.1), AdamW([unused], lr=0.1)]
    _backward(scaler, used)
    scaler.step(*optimizers)
    scaler.update()
    assert used.tolist() == pytest.approx([0.9, -2.1])
    assert unused.tolist() == [1.0, -2.0]


# What DeepSpeed's names mean, written out by hand: "x" is an overflow, "." none, and below it the scale's power of two
# after that window. It starts at 2**4. See update_scale of deepspeed/runtime/fp16/loss_scaler.py, 0.19.
SEQUENCES = {
    "a first growth takes one window more than later ones": ({"growth_interval": 2}, ". . . . . . .", "4 4 5 5 6 6 7"),
    "so does the first after an overflow": ({"growth_interval": 2}, ". . x . . . . . .", "4 4 3 3 3 4 4 5 5"),
    "an overflow starts the count anew": ({"growth_interval": 3}, ". . . x . . . x . . . .", "4 4 4 3 3 3 3 2 2 2 2 3"),
    "an overflow right after a growth": ({"growth_interval": 2}, ". . . x x .", "4 4 5 4 3 3"),
    "hysteresis is used up once, until the scale grows": (
        {"growth_interval": 3, "hysteresis": 2},
        "x . x . x . . . . x x",
        "4 4 3 3 2 2 2 2 3 3 2",
    ),
    "consecutive hysteresis is counted anew after every update": (
        {"growth_interval": 3, "hysteresis": 2, "consecutive_hysteresis": True},
        "x . x . x x . . . . x x",
        "4 4 4 4 4 3 3 3 3 4 4 3",
    ),
    "consecutive hysteresis without an update between": (
        {"growth_interval": 9, "hysteresis": 3, "consecutive_hysteresis": True},
        "x x x x . x x x",
        "4 4 3 2 2 2 2 1",
    ),
    "three overflows until it shrinks": ({"hysteresis": 3}, "x x x x", "4 4 3 2"),
    "an overflow that hysteresis forgives starts the count anew too": (
        {"growth_interval": 2, "hysteresis": 2},
        ". . x . . . .",
        "4 4 4 4 4 5 5",
    ),
    "a floor": ({"min_scale": 4.0, "growth_interval": 1}, "x x x x . .", "3 2 2 2 2 3"),
    "a ceiling, which DeepSpeed has not": ({"max_scale": 32.0, "growth_interval": 1}, ". . . . x . .", "4 5 5 5 4 4 5"),
    "a constant scale": ({"dynamic": False, "growth_interval": 1}, "x x . . . .", "4 4 4 4 4 4"),
    "torch's factors": (
        {"growth_factor": 4.0, "backoff_factor": 0.125, "growth_interval": 1},
        ". . x . .",
        "4 6 3 3 5",
    ),
}


def _powers(scaler: LossScaler, pattern: str) -> list[float]:
    powers = []
    for mark in pattern.split():
        scaler.advance(torch.tensor(float(mark == "x")))
        powers.append(math.log2(scaler.get_scale()))
    return powers


@pytest.mark.parametrize("case", SEQUENCES)
def test_the_scale_moves_as_deepspeed_documents(case: str) -> None:
    settings, pattern, expected = SEQUENCES[case]
    assert _powers(LossScaler("cpu", init_scale=16.0, **settings), pattern) == [*map(int, expected.split())]


def _drawn(seed: int) -> tuple[dict[str, Any], list[bool]]:
    """Settings, and which windows overflow: now and then, or often."""
    draw = random.Random(seed)  # noqa: S311
    settings = {
        "init_scale": 2.0 ** draw.randint(2, 12),
        "growth_interval": draw.choice([1, 2, 3, 7]),
        "hysteresis": draw.choice([1, 1, 2, 3]),
        "consecutive_hysteresis": draw.random() < 0.5,
        "min_scale": draw.choice([0.25, 1.0, 4.0]),
    }
    share = draw.choice([0.02, 0.2, 0.6])
    return settings, [draw.random() < share for _ in range(80)]


@pytest.mark.parametrize("ceiling", [8, 2.0**80])
@pytest.mark.parametrize("seed", range(30))
def test_the_scale_moves_as_deepspeeds_own_within_its_bounds_in_powers_of_two(
    seed: int, ceiling: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSpeed's has no ceiling: it is put below ours after each window."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = pytest.importorskip("deepspeed.runtime.fp16.loss_scaler")
    monkeypatch.setattr(theirs.dist, "get_rank", lambda: 0)  # it asks who is to print
    settings, overflows = _drawn(seed)
    largest = settings["init_scale"] * ceiling
    ours, scales = LossScaler("cpu", max_scale=largest, **settings), []
    reference = theirs.DynamicLossScaler(
        init_scale=settings["init_scale"],
        scale_window=settings["growth_interval"],
        min_scale=settings["min_scale"],
        delayed_shift=settings["hysteresis"],
        consecutive_hysteresis=settings["consecutive_hysteresis"],
        raise_error_at_min_scale=False,
    )
    for overflow in overflows:
        ours.advance(torch.tensor(float(overflow)))
        reference.update_scale(overflow)
        reference.cur_scale = min(reference.cur_scale, largest)
        scales.append(ours.get_scale())
        assert scales[-1] == reference.cur_scale
    assert settings["min_scale"] <= min(scales) < max(scales) <= largest
    assert {math.frexp(scale)[0] for scale in scales} == {0.5}


def test_the_scale_moves_in_place_and_reads_nothing_back() -> None:
    scaler = LossScaler("cpu", growth_interval=1, hysteresis=2)
    scale, found = scaler.current, torch.ones(())
    with OperationCounter() as operations:
        for _ in range(3):
            scaler.advance(found)
    assert operations.counts["device reads"] == 0
    assert scaler.current is scale
    assert (scale.shape, scale.dtype, scale.item()) == ((), torch.float32, 2.0**14)


@pytest.mark.parametrize("other", [torch.amp.GradScaler, ShardedGradScaler])
def test_its_state_is_torchs_both_ways(other: Any, group: World) -> None:
    """The same five keys, of the same types and meaning, and one key more that torch's does not look at."""
    theirs, ours = other("cpu", growth_interval=5), LossScaler("cpu", growth_interval=5, hysteresis=2)
    parameters = [_parameter(), _parameter()]
    optimizers = [SGD([p], lr=0.0) for p in parameters]
    for gradient in (INF, INF, 1.0, 1.0, 1.0):
        _window(theirs, optimizers[0], parameters[0], gradient)
        _window(ours, optimizers[1], parameters[1], gradient)
    saved = theirs.state_dict()
    assert ours.state_dict().keys() == saved.keys() | {"_hysteresis"}
    assert saved.keys() == FIVE
    kinds = {name: type(value) for name, value in ours.state_dict().items() if name in FIVE}
    assert kinds == {name: type(value) for name, value in saved.items()}
    assert (saved["scale"], saved["_growth_tracker"]) == (2.0**14, 3)

    taken = LossScaler("cpu", growth_interval=5)
    taken.load_state_dict(saved)
    assert {name: value for name, value in taken.state_dict().items() if name in FIVE} == saved
    for scaler, optimizer, parameter in ((theirs, optimizers[0], parameters[0]), (taken, optimizers[1], parameters[1])):
        for expected in (2.0**14, 2.0**15):
            _window(scaler, optimizer, parameter)
            assert scaler.get_scale() == expected

    given = other("cpu")
    given.load_state_dict(ours.state_dict())
    _backward(given, parameters[0])  # torch's takes up a state where it is first used
    assert given.state_dict() == {name: value for name, value in ours.state_dict().items() if name in FIVE}


@pytest.mark.parametrize("cut", range(14))
def test_a_saved_scaler_goes_on_as_one_that_was_not(cut: int) -> None:
    settings: dict[str, Any] = {"growth_interval": 3, "hysteresis": 2, "init_scale": 16.0}
    pattern = ". . x . . . . . . . x x . . . ."
    whole = LossScaler("cpu", **settings)
    expected = _powers(whole, pattern)
    assert len(set(expected)) > 2
    first, second = LossScaler("cpu", **settings), LossScaler("cpu", **settings)
    powers = _powers(first, " ".join(pattern.split()[:cut]))
    second.load_state_dict(first.state_dict())
    powers += _powers(second, " ".join(pattern.split()[cut:]))
    assert powers == expected
    assert second.state_dict() == whole.state_dict()


def test_a_loaded_scaler_keeps_this_runs_bounds_and_hysteresis() -> None:
    saved = LossScaler("cpu", init_scale=2.0**20, growth_interval=9, growth_factor=8.0, hysteresis=5)
    _powers(saved, "x . .")
    scaler = LossScaler("cpu", max_scale=2.0**18, hysteresis=2, growth_interval=2)
    scaler.load_state_dict(saved.state_dict())
    state = scaler.state_dict()
    assert (state["scale"], state["_growth_tracker"], state["_hysteresis"]) == (2.0**18, 1, 2)
    assert (state["growth_factor"], state["growth_interval"]) == (8.0, 9)  # as torch's
    constant = LossScaler("cpu", init_scale=64.0, dynamic=False)
    constant.load_state_dict(saved.state_dict())
    assert constant.get_scale() == 64.0


@both
def test_a_shorter_interval_than_the_saved_row_still_grows(Scaler: Any, group: World) -> None:  # noqa: N803
    """Torch's counts to the interval exactly, and with one that it has passed never grows again."""
    scaler, parameter = Scaler("cpu", init_scale=16.0, growth_interval=5), _parameter()
    saved = scaler.state_dict() | {"scale": 16.0, "growth_interval": 5, "_growth_tracker": 40}  # as set later
    scaler.load_state_dict(saved)
    optimizer = SGD([parameter], lr=0.0)
    _window(scaler, optimizer, parameter)
    assert scaler.get_scale() == 32.0
    scales: list[Tensor] = []
    for _ in range(5):
        _window(scaler, optimizer, parameter)
        scales.append(scaler.get_scale())
    assert scales == [32.0] * 4 + [64.0]


def test_a_copys_state_is_its_own() -> None:
    scaler = LossScaler("cpu", init_scale=8.0)
    copied = copy.deepcopy(scaler)
    copied.advance(torch.tensor(1.0))
    assert (copied.get_scale(), copied.state_dict()["scale"], scaler.get_scale()) == (4.0, 4.0, 8.0)


def test_a_scale_set_by_hand_stays_within_bounds() -> None:
    scaler = LossScaler("cpu", min_scale=2.0, max_scale=16.0)
    scaler.update(0.0)
    assert scaler.get_scale() == 2.0
    scaler.update(1024.0)
    assert scaler.get_scale() == 16.0


def test_torchs_setters_change_the_rule() -> None:
    scaler = LossScaler("cpu", init_scale=16.0)
    scaler.set_growth_factor(4.0)
    scaler.set_backoff_factor(0.25)
    scaler.set_growth_interval(1)
    scales = []
    for overflow in (0.0, 0.0, 1.0):
        scaler.advance(torch.tensor(overflow))
        scales.append(scaler.get_scale())
    assert scales == [16.0, 64.0, 16.0]
    assert (scaler.get_growth_factor(), scaler.state_dict()["growth_factor"]) == (4.0, 4.0)


def test_an_optimizer_that_is_gone_is_not_taken_for_the_next_one() -> None:
    scaler = LossScaler("cpu", init_scale=2.0)
    parameter = _parameter()
    for _ in range(20):  # the memory of one, and so its id, is soon another's
        parameter.grad = torch.ones(2)
        scaler.step(SGD([parameter], 0.0))
    scaler.update()
