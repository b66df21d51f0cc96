"""``batch.schedule``: a run whose global batch grows, beside plain torch and beside a loop that is cut in two."""

import math
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distaccum import Accumulator, BatchConfig, DataSpec, RunConfig, Trainer
from distaccum.distributed.world import World
from distaccum.engines.modules import to_local
from distaccum.errors import ConfigError
from distaccum.tools import growth
from distaccum.train.schedules import Cosine
from tests.support.accumulators import Loss as Squares
from tests.support.commands import metrics
from tests.support.runs import CONSTANT, NOTHING, settings

N, EPOCHS, WARMUP = 23, 3, 3
STAGES = [{"global_size": 3, "updates": 4}, {"global_size": 5, "samples": 20}]
SIZES = [3, 3, 3, 3, 5, 5, 1, 5, 5, 8, 5, 8, 8, 7]  # of every window: worked out by hand
GENERATOR = torch.Generator().manual_seed(3)
X = torch.randn(N, 6, generator=GENERATOR, dtype=torch.float64)
DATA = DataSpec(train=list(X.unbind()), shuffle=False)


def _model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def _config(schedule: list[dict[str, int]], more: Mapping[str, Any] = NOTHING, **trainer: Any) -> RunConfig:
    groups = {
        "batch": {"global_size": 8, "micro_size": 2, "schedule": schedule},
        "optim": {"lr": 0.05, "clip_norm": None, "optimizer": {"_target_": "torch.optim.SGD", "momentum": 0.9}},
        "schedule": {"_target_": "distaccum.train.schedules.Cosine", "warmup_steps": WARMUP},
    }
    trainer = {"max_steps": None, "max_epochs": EPOCHS, "log_every": 1, **trainer}
    return settings(None, trainer, save=3, resume="auto", **groups | more)


def _fit(folder: Path, config: RunConfig, **given: Any) -> list[Tensor]:
    model = _model()
    Trainer(model, Squares(), DATA, config=config, run_dir=folder, **given).fit()
    return [p.detach().clone() for p in model.parameters()]


def _plain(sizes: list[int], factor: Any) -> list[Tensor]:
    """The weights after windows of these sizes, by plain torch on each window's whole batch."""
    model, begin = _model(), 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step, size in enumerate(sizes):
        batch, begin = X[begin : begin + size], (begin + size) % N
        optimizer.param_groups[0]["lr"] = 0.05 * factor(step)
        optimizer.zero_grad()
        ((model(batch) - 1).square().sum() / size).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def _cosine(step: int) -> float:
    if step < WARMUP:
        return (step + 1) / (WARMUP + 1)
    done = (step - WARMUP) / (len(SIZES) - WARMUP)
    return 0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2


def test_it_is_plain_torch_on_windows_of_these_sizes(gloo_world: World, tmp_path: Path) -> None:
    found = _fit(tmp_path, _config(STAGES))
    torch.testing.assert_close(found, _plain(SIZES, _cosine), rtol=1e-12, atol=1e-13)
    assert sum(SIZES) == EPOCHS * N


def test_it_is_a_loop_that_is_cut_in_two(gloo_world: World, tmp_path: Path) -> None:
    config = _config([{"global_size": 3, "updates": 4}], max_epochs=1)
    steps = 4 + math.ceil((N - 12) / 8)
    grown = _fit(tmp_path, config)

    def loop(model: nn.Module) -> Accumulator:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        schedule = Cosine(warmup_steps=WARMUP, total_steps=steps)
        return Accumulator(model, optimizer, global_batch_size=3, micro_batch_size=2, count=len, schedule=schedule)

    def run(acc: Accumulator, windows: int | None) -> None:
        for window in islice(acc.windows(DATA), windows):
            for micro in window:
                with acc.accumulate():
                    acc.backward(Squares()(acc.model, micro.batch))

    first = loop(_model())
    run(first, 4)
    state = first.state_dict()
    first.close()
    model = _model()
    second = loop(model)
    second.load_state_dict(state)
    second.set_global_batch_size(8)
    run(second, None)
    assert second.progress.step == steps
    torch.testing.assert_close(grown, [p.detach() for p in model.parameters()], rtol=1e-13, atol=1e-15)
    second.close()


def test_a_schedule_of_one_size_changes_no_bit(gloo_world: World, tmp_path: Path) -> None:
    plain = _fit(tmp_path / "plain", _config([]))
    for name, stages in (
        ("updates", [{"global_size": 8, "updates": 4}]),
        ("samples", [{"global_size": 8, "samples": 9}]),
    ):
        torch.testing.assert_close(_fit(tmp_path / name, _config(stages)), plain, rtol=0, atol=0)


def test_another_schedule_is_no_continuation(gloo_world: World, tmp_path: Path) -> None:
    _fit(tmp_path, _config(STAGES, max_epochs=None, max_steps=6))
    for other in ([], STAGES[:1], [*STAGES, {"global_size": 7, "updates": 1}]):
        with pytest.raises(ConfigError, match=r"batch\.(schedule|global_size)=.*counts its windows with") as error:
            _fit(tmp_path, _config(other, max_epochs=None, max_steps=9))
        assert "Continue with batch." in str(error.value)
    resumed = _fit(tmp_path, _config(STAGES, max_epochs=None, max_steps=9))
    assert all(torch.isfinite(p).all() for p in resumed)


@pytest.mark.parametrize(("rule", "engine"), [("none", "fsdp2"), ("sqrt", "zero1"), ("linear", "ddp")])
def test_rate_betas_and_decay_follow_the_batch(gloo_world: World, tmp_path: Path, rule: str, engine: str) -> None:
    """Also in an epoch's last window, which is smaller than its stage's, and after a resume in the middle."""
    batch = {"global_size": 8, "micro_size": 2, "schedule": STAGES}
    adamw = {"_target_": "torch.optim.AdamW", "betas": [0.9, 0.99], "weight_decay": 0.2}
    more = {
        "engine": {"name": engine},
        "batch": batch | {"scale_lr": rule, "scale_betas": True, "scale_decay": True},
        "optim": {"lr": 0.05, "clip_norm": None, "optimizer": adamw},
        "schedule": CONSTANT,
    }
    for steps in (7, len(SIZES)):
        found = _fit(tmp_path, _config(STAGES, more, max_epochs=None, max_steps=steps))
    model, begin, rates = _model(), 0, []
    optimizer = torch.optim.AdamW(model.parameters())
    (group,) = optimizer.param_groups
    for size, stage in zip(SIZES, [3] * 4 + [5] * 5 + [8] * 5, strict=True):  # by hand
        rows, begin = X[begin : begin + size], (begin + size) % N
        factor = {"none": 1.0, "sqrt": (stage / 8) ** 0.5, "linear": stage / 8}[rule]
        group["lr"], group["weight_decay"] = 0.05 * factor, 0.2 * (stage / 8) / factor
        group["betas"] = 0.9 ** (stage / 8), 0.99 ** (stage / 8)
        optimizer.zero_grad()
        ((model(rows) - 1).square().sum() / size).backward()
        optimizer.step()
        rates.append(group["lr"])
    own = [to_local(p) for p in found]
    torch.testing.assert_close(own, [p.detach() for p in model.parameters()], rtol=1e-12, atol=1e-13)
    assert [record["lr"] for record in metrics(tmp_path)] == pytest.approx(rates, rel=1e-12)
    run: Any = SimpleNamespace(config=_config(STAGES, more), optimizers=[torch.optim.AdamW(_model().parameters())])
    if rule == "sqrt":
        assert growth.stages(run).startswith(
            "3: lr 0.000612372, betas 0.96126 0.999625, weight_decay 0.00612372; 5: lr 0.00"
        )


@pytest.mark.parametrize(
    ("key", "stages", "said"),
    [("betas", STAGES, "SGD has no betas"), ("decay", STAGES, "SGD decays no"), ("decay", [], "and no stage")],
)
def test_what_is_not_there_is_not_scaled(gloo_world: World, tmp_path: Path, key: str, stages: Any, said: str) -> None:
    batch = {"global_size": 8, "micro_size": 2, "schedule": stages, f"scale_{key}": True}
    with pytest.raises(ConfigError, match=rf"batch\.s.*: {said}"):
        _fit(tmp_path, _config([], {"batch": batch, "optim": {"optimizer": {"_target_": "torch.optim.SGD"}}}))


def test_numbers_may_come_from_the_environment() -> None:
    made = BatchConfig(schedule=[{"global_size": "4", "updates": 2}])  # as ${oc.env:FIRST} gives it
    assert made.schedule == [{"global_size": 4, "updates": 2}]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"schedule": [3]}, r"batch\.schedule\.0=3: is no mapping. Write \{global_size: 16, updates: 100\}"),
        ({"schedule": [{"updates": 3}]}, r"batch\.schedule\.0=.*: has no global_size"),
        ({"schedule": [{"global_size": 3}]}, r"batch\.schedule\.0=.*: says not how long it holds"),
        ({"schedule": [{"global_size": 3, "steps": 1}]}, r"batch\.schedule\.0=.*: has steps, which no stage has"),
        (
            {"schedule": [{"global_size": 3, "updates": 1, "tokens": 1}]},
            r"batch\.schedule\.0=.*: says updates and tokens how long it holds",
        ),
        ({"schedule": [{"global_size": 0, "updates": 1}]}, r"batch\.schedule\.0\.global_size=0: is no whole number"),
        ({"schedule": [{"global_size": 2, "updates": 1.5}]}, r"batch\.schedule\.0\.updates=1\.5: is no whole number"),
        ({"scale_lr": "cubic"}, r"batch\.scale_lr=cubic: no such choice"),
        ({"schedule": {"global_size": 2}}, r"batch\.schedule=\{'global_size': 2\}: not of type list"),
        (
            {"schedule": [{"global_size": 3, "updates": 1}], "tokens": 4, "global_size": None},
            r"batch\.schedule=.*: and batch\.tokens=4 is a budget of tokens",
        ),
    ],
)
def test_what_is_no_schedule_is_refused(batch: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BatchConfig(**batch)
