from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from distaccum.errors import ConfigError
from distaccum.train.optimizer import TorchSchedule
from distaccum.train.schedules import WSD, Constant, Cosine, Linear

PEAK = 3e-3


def test_cosine_follows_torchs_own_after_the_warm_up() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    torchs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=90, eta_min=0.1)
    ours = Cosine(total_steps=100, warmup_steps=10, final_ratio=0.1)
    for step in range(10, 100):
        assert ours(step) == pytest.approx(torchs.get_last_lr()[0], rel=1e-9)
        optimizer.step()
        torchs.step()


def test_warm_up_rises_evenly_from_above_zero() -> None:
    ours = Constant(total_steps=100, warmup_steps=3)
    assert [ours(step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_past_the_end_it_stays_at_the_final_ratio() -> None:
    assert Cosine(total_steps=10, final_ratio=0.2)(1000) == pytest.approx(0.2)


@pytest.mark.parametrize("kind", [Constant, Cosine, Linear, WSD])
@pytest.mark.parametrize(("total", "steps"), [(40, 4), (300, 30), (7, 1)])
def test_a_warm_up_is_a_share_of_the_run_or_the_steps_that_are_stated(kind: Any, total: int, steps: int) -> None:
    by_share, by_steps = kind(total_steps=total, warmup_ratio=0.1), kind(total_steps=total, warmup_steps=steps)
    both = kind(total_steps=total, warmup_ratio=0.9, warmup_steps=steps)
    rates = [[one(step) for step in range(total + 1)] for one in (by_share, by_steps, both)]
    assert rates[0] == rates[1] == rates[2]
    assert rates[0][steps - 1] < 1 == rates[0][steps]


def test_a_long_warm_up_is_told(caplog: pytest.LogCaptureFixture) -> None:
    Cosine(total_steps=40, warmup_steps=4)
    assert not caplog.text
    Cosine(total_steps=40, warmup_steps=60)
    assert "schedule.warmup_steps=60 is more than a tenth of the run's 40 updates" in caplog.text


def test_bad_values_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"schedule\.warmup_ratio=1.5"):
        Linear(total_steps=1, warmup_ratio=1.5)
    with pytest.raises(ConfigError, match=r"schedule\.warmup_steps=-1"):
        Constant(total_steps=1, warmup_steps=-1)
    with pytest.raises(ConfigError, match=r"schedule\.final_ratio=2"):
        Cosine(total_steps=1, final_ratio=2)


def _rates(schedule: Callable[[int], float], steps: int) -> list[float]:
    return [PEAK * schedule(step) for step in range(steps)]


def _torchs(kind: Any, steps: int, **arguments: Any) -> list[float]:
    """The rate of each update in a plain loop."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    scheduler, rates = kind(optimizer, **arguments), []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def test_linear_follows_torchs_own_after_the_warm_up() -> None:
    for ratio in (0.0, 0.1):
        ours = _rates(Linear(total_steps=100, warmup_steps=10, final_ratio=ratio), 110)
        torchs = _torchs(torch.optim.lr_scheduler.LinearLR, 100, start_factor=1.0, end_factor=ratio, total_iters=90)
        assert ours[10:] == pytest.approx(torchs, rel=1e-9, abs=1e-15)
        assert ours[:10] == pytest.approx([PEAK * (n + 1) / 11 for n in range(10)])


@pytest.mark.parametrize("decay", ["linear", "sqrt", "cosine"])
def test_wsd_is_the_published_formula_at_every_step(decay: str) -> None:
    total, warmup, length, final = 200, 20, 40, 0.05
    ours = WSD(total_steps=total, warmup_steps=warmup, decay_ratio=0.2, decay=decay, final_ratio=final)
    for step in range(total + 5):
        if step < warmup:
            expected = (step + 1) / (warmup + 1)
        elif step <= total - length:
            expected = 1.0
        else:
            over = min(step - (total - length), length) / length
            left = {"linear": 1 - over, "sqrt": 1 - over**0.5, "cosine": 0.5 + 0.5 * math.cos(math.pi * over)}[decay]
            expected = left + final * (1 - left)
        assert ours(step) == pytest.approx(expected, rel=1e-12)


def test_a_longer_run_with_wsd_has_the_same_rates_before_its_decay() -> None:
    short, long = (WSD(total_steps=total, warmup_steps=5, decay_ratio=0.25) for total in (40, 80))
    assert [short(step) for step in range(31)] == [long(step) for step in range(31)]
    assert short(31) < long(31) == 1


TORCHS: dict[str, dict[str, Any]] = {
    "StepLR": {"step_size": 7, "gamma": 0.5},
    "MultiStepLR": {"milestones": [3, 9], "gamma": 0.1},
    "ExponentialLR": {"gamma": 0.9},
    "PolynomialLR": {"total_iters": 30, "power": 2.0},
    "CosineAnnealingLR": {"T_max": 30, "eta_min": 1e-4},
    "CosineAnnealingWarmRestarts": {"T_0": 5, "T_mult": 2},
    "CyclicLR": {"base_lr": 1e-3, "max_lr": PEAK, "step_size_up": 4, "cycle_momentum": False},
    "OneCycleLR": {"max_lr": PEAK, "total_steps": 30, "cycle_momentum": False},
}


@pytest.mark.parametrize("name", TORCHS)
def test_torchs_own_give_their_rates_at_every_step(name: str) -> None:
    expected = _torchs(getattr(torch.optim.lr_scheduler, name), 30, **TORCHS[name])
    ends = {"OneCycleLR": {"total_steps"}}.get(name, set())  # the run's
    arguments = {key: value for key, value in TORCHS[name].items() if key not in ends}
    node = {"_target_": f"torch.optim.lr_scheduler.{name}", **arguments}
    ours = TorchSchedule(node, peak=PEAK, total_steps=30)
    assert _rates(ours, 30) == pytest.approx(expected, rel=1e-12)
    assert TorchSchedule(node, peak=PEAK, total_steps=30)(17) == ours(17)  # as after a resume
    assert ours(100) == ours(29)


def halved(step: int) -> float:
    """For LambdaLR."""
    return 0.5**step


def test_a_lambda_of_torchs_is_named_by_its_function() -> None:
    function = {"_target_": f"{__name__}.halved", "_partial_": True}
    node = {"_target_": "torch.optim.lr_scheduler.LambdaLR", "lr_lambda": function}
    assert [TorchSchedule(node, peak=PEAK, total_steps=9)(step) for step in range(4)] == [1, 0.5, 0.25, 0.125]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "its usual momentum": (
        {"_target_": "CyclicLR", "base_lr": 0.01, "max_lr": 0.1},
        r"CyclicLR: sets momentum too.*cycle_momentum: false",
    ),
    "momentum": ({"_target_": "OneCycleLR", "max_lr": 0.1}, r"OneCycleLR: sets momentum too.*cycle_momentum: false"),
    "an argument": ({"_target_": "StepLR", "step": 3}, r"schedule\.step=3: no such argument; did you mean step_size"),
    "none of it": ({"_target_": "StepLR"}, r"schedule=.*StepLR: TypeError: .*step_size"),
    "others inside": ({"_target_": "SequentialLR", "schedulers": [], "milestones": []}, r"schedule=.*SequentialLR: "),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_function_of_the_step_is_refused(case: str) -> None:
    node, expected = REFUSED[case]
    with pytest.raises(ConfigError, match=expected):
        TorchSchedule(node | {"_target_": f"torch.optim.lr_scheduler.{node['_target_']}"}, peak=PEAK, total_steps=9)


def test_bad_values_of_a_decay_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"schedule\.decay_ratio=1\.5: not between 0 and 1"):
        WSD(total_steps=9, decay_ratio=1.5)
    with pytest.raises(ConfigError, match=r"schedule\.decay=exp: no such choice"):
        WSD(total_steps=9, decay="exp")
    with pytest.raises(ConfigError, match=r"schedule\.final_ratio=-1"):
        Linear(total_steps=9, final_ratio=-1)
