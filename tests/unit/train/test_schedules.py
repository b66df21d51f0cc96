import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from distaccum import Callback, RunConfig, Trainer
from distaccum.accumulation.step import Outcome
from distaccum.distributed.world import World
from distaccum.errors import ConfigError
from distaccum.train.callbacks import Run
from distaccum.train.rates import make_schedule
from distaccum.train.schedules import WSD, Constant, Cosine, Linear
from tests.support.accumulators import Loss
from tests.support.runs import settings

PEAK = 3e-3


def test_warm_up_rises_evenly_from_above_zero_and_past_the_end_it_stays_at_the_final_ratio() -> None:
    ours = Constant(total_steps=100, warmup_steps=3)
    assert [ours(step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
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


@pytest.mark.parametrize("ratio", [0.0, 0.1])
@pytest.mark.parametrize("kind", [Linear, Cosine])
def test_ours_follow_torchs_own_after_the_warm_up(kind: Any, ratio: float) -> None:
    torchs: tuple[Any, dict[str, Any]] = {
        Linear: (lr_scheduler.LinearLR, {"start_factor": 1.0, "end_factor": ratio, "total_iters": 90}),
        Cosine: (lr_scheduler.CosineAnnealingLR, {"T_max": 90, "eta_min": ratio * PEAK}),
    }[kind]
    ours = _rates(kind(total_steps=100, warmup_steps=10, final_ratio=ratio), 100)
    assert ours[10:] == pytest.approx(_torchs(torchs[0], 90, **torchs[1]), rel=1e-9, abs=1e-15)
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
    ours = make_schedule(node, peak=PEAK, total_steps=30)
    assert _rates(ours, 30) == pytest.approx(expected, rel=1e-12)
    assert make_schedule(node, peak=PEAK, total_steps=30)(17) == ours(17)  # as after a resume
    assert ours(100) == ours(29)


def halved(step: int) -> float:
    return 0.5**step


def test_a_lambda_of_torchs_is_named_by_its_function() -> None:
    function = {"_target_": f"{__name__}.halved", "_partial_": True}
    node = {"_target_": "torch.optim.lr_scheduler.LambdaLR", "lr_lambda": function}
    assert [make_schedule(node, peak=PEAK, total_steps=9)(step) for step in range(4)] == [1, 0.5, 0.25, 0.125]


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
        make_schedule(node | {"_target_": f"torch.optim.lr_scheduler.{node['_target_']}"}, peak=PEAK, total_steps=9)


def _sgd(*rates: float) -> torch.optim.SGD:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates or (PEAK,)]
    return torch.optim.SGD(groups, momentum=0.9, lr=PEAK)


def _warmed(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    """As libraries make their schedules: a function of the optimizer."""
    return lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / steps))


def _sequence(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(optimizer, 9)]
    return lr_scheduler.SequentialLR(optimizer, parts, [3])


def _chained(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return lr_scheduler.ChainedScheduler([_warmed(optimizer, 4), lr_scheduler.ExponentialLR(optimizer, 0.9)])


FALLS: Callable[[Any], Any] = partial(lr_scheduler.LinearLR, start_factor=1.0, end_factor=0.0, total_iters=12)
STEPS: Callable[[Any], Any] = partial(lr_scheduler.StepLR, step_size=4, gamma=0.5)
COSINE: Callable[[Any], Any] = partial(lr_scheduler.CosineAnnealingLR, T_max=12)
CYCLE = partial(lr_scheduler.OneCycleLR, cycle_momentum=False)
GIVEN: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    # in Python: what is given of an optimizer, and the same in a plain loop of torch's
    "a scheduler": (STEPS, STEPS),
    "one of several parts": (_sequence, _sequence),
    "a chain": (_chained, _chained),
    "its class with arguments": (lambda _: COSINE, COSINE),
    "a class that takes the end": (
        lambda _: partial(CYCLE, max_lr=PEAK),
        partial(CYCLE, max_lr=[PEAK, 2 * PEAK], total_steps=12),
    ),
    "a function of the optimizer": (lambda _: partial(_warmed, steps=5), partial(_warmed, steps=5)),
    "a function of the step": (lambda _: lambda step: 0.5**step, partial(lr_scheduler.ExponentialLR, gamma=0.5)),
    "with its arguments": (lambda _: partial(pow, 0.5), partial(lr_scheduler.ExponentialLR, gamma=0.5)),
    "ours": (lambda _: Linear(total_steps=12), FALLS),
    "our class": (lambda _: Linear, FALLS),
    "our class with arguments": (lambda _: partial(Cosine, final_ratio=0.0), COSINE),
    "a name": (lambda _: "constant", partial(lr_scheduler.ConstantLR, factor=1.0)),
    "a mapping": (lambda _: {"_target_": "torch.optim.lr_scheduler.StepLR", "step_size": 4, "gamma": 0.5}, STEPS),
}


@pytest.mark.parametrize("name", GIVEN)
def test_a_run_has_the_rates_of_what_is_given_in_a_plain_loop(name: str, gloo_world: World, tmp_path: Path) -> None:
    """Twice, as a notebook's cell is run again; and from the middle on."""
    given, plain = GIVEN[name]
    truth, expected = _sgd(PEAK, 2 * PEAK), []
    scheduler = plain(truth)
    for _ in range(12):
        expected.append([group["lr"] for group in truth.param_groups])
        truth.step()
        scheduler.step()
    model = torch.nn.Linear(3, 1)
    groups = [{"params": [model.weight], "lr": PEAK}, {"params": [model.bias], "lr": 2 * PEAK}]
    optimizer = torch.optim.SGD(groups, lr=PEAK, momentum=0.9)
    schedule = given(optimizer)
    for folder, resume in (("first", "never"), ("again", "never"), ("rest", tmp_path / "first/checkpoints/step-5")):
        seen = Rates()
        Trainer(
            model,
            Loss(),
            list(torch.ones(24, 3)),
            optimizer=optimizer,
            schedule=schedule,
            callbacks=[seen],
            checkpoint_every=5,
            resume=resume,
            config=settings((2, 2), {"max_steps": 12}, checkpoint={"keep": 0}),
            run_dir=tmp_path / folder,
        ).fit()
        rates, those = (
            torch.tensor(one, dtype=torch.float64) for one in (seen.found, expected[12 - len(seen.found) :])
        )
        torch.testing.assert_close(rates, those, rtol=1e-9, atol=1e-15)
    assert len(seen.found) == 7


class Rates(Callback):
    """Of each group at each update."""

    def __init__(self) -> None:
        self.found: list[list[float]] = []

    def on_update(self, run: Run, outcome: Outcome) -> None:
        self.found.append([float(group["lr"]) for group in run.optimizers[0].param_groups])


def _own_each(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.LambdaLR(optimizer, [lambda step: 1.0, lambda step: 0.5**step])


BAD: dict[str, tuple[Callable[[torch.optim.Optimizer], Any], str]] = {
    "a typo": (
        lambda _: "cosin",
        r"^schedule=cosin: no such schedule; did you mean cosine.*Use one of constant, cosine",
    ),
    "another optimizer's": (
        lambda _: lr_scheduler.StepLR(_sgd(), 1),
        "StepLR: sets the rates of an optimizer that is not",
    ),
    "a factor a group": (_own_each, "multiplies the rates of the optimizer's groups by 1, 0.5"),
    "the momentum too": (lambda one: lr_scheduler.CyclicLR(one, PEAK, 1.0), "sets momentum too"),
    "a plateau": (lr_scheduler.ReduceLROnPlateau, "Use callbacks=plateau"),
    "the class of one": (lambda _: lr_scheduler.ReduceLROnPlateau, "Use callbacks=plateau"),
    "no arguments": (lambda _: lr_scheduler.StepLR, r"TypeError: .*step_size.*functools\.partial"),
    "no function of the step": (lambda _: lambda: 1.0, "cannot be called with 0 applied updates"),
    "below zero later": (lambda _: lambda step: 1 - step / 6, "gives -0.16"),
    "no schedule": (lambda _: 0.5, "gives None for the first update"),
    "a scheduler of another kind": (lambda _: lambda optimizer: object(), "makes a object, which"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_given_in_python_and_is_no_schedule_is_refused(case: str) -> None:
    given, expected = BAD[case]
    optimizer = _sgd(PEAK, PEAK)
    with pytest.raises(ConfigError, match=expected):
        Trainer(torch.nn.Linear(3, 1), Loss(), [1], optimizer=optimizer, schedule=given(optimizer), max_steps=12)


def test_a_rate_for_a_factor_and_a_scheduler_that_is_not_given_are_told(caplog: pytest.LogCaptureFixture) -> None:
    make_schedule(lambda step: 6e-4 * 0.9**step, peak=6e-4, total_steps=12)
    assert "is 0.0006, so that the highest rate is 3.6e-07: a schedule gives a factor of the rate" in caplog.text
    lr_scheduler.StepLR(optimizer := _sgd(), 1)
    Trainer(torch.nn.Linear(3, 1), Loss(), [1], optimizer=optimizer, max_steps=12)
    assert "nothing steps it: give it as schedule=" in caplog.text


def test_a_name_is_that_of_the_command_line() -> None:
    of_python = Trainer(torch.nn.Linear(3, 1), Loss(), [1], schedule="one_cycle", max_steps=12)._components
    assert of_python.config.schedule == RunConfig.from_dict({"schedule": "one_cycle"}).schedule
    assert of_python.config.schedule["max_lr"] == RunConfig().optim.lr


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        (Linear, {"warmup_ratio": 1.5}, r"schedule\.warmup_ratio=1.5"),
        (Constant, {"warmup_steps": -1}, r"schedule\.warmup_steps=-1"),
        (Cosine, {"final_ratio": 2}, r"schedule\.final_ratio=2"),
        (Linear, {"final_ratio": -1}, r"schedule\.final_ratio=-1"),
        (WSD, {"decay_ratio": 1.5}, r"schedule\.decay_ratio=1\.5: not between 0 and 1"),
        (WSD, {"decay": "exp"}, r"schedule\.decay=exp: no such choice"),
    ],
)
def test_bad_values_are_refused(kind: Any, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kind(total_steps=9, **given)
