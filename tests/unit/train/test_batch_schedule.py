"""``batch.schedule``: a run whose global batch grows, beside plain torch and beside a loop that is cut in two."""

from __future__ import annotations

import math
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distaccum import Accumulator, BatchConfig, DataSpec, RunConfig, Trainer
from distaccum.distributed.world import World
from distaccum.errors import ConfigError
from distaccum.train.schedules import Cosine
from tests.support.accumulators import Loss as Squares
from tests.support.runs import settings

N, EPOCHS, WARMUP = 23, 3, 3
STAGES = [{"global_size": 3, "updates": 4}, {"global_size": 5, "samples": 20}]
SIZES = [3, 3, 3, 3, 5, 5, 1, 5, 5, 8, 5, 8, 8, 7]  # of every window: worked out by hand
GENERATOR = torch.Generator().manual_seed(3)
X = torch.randn(N, 6, generator=GENERATOR, dtype=torch.float64)
DATA = DataSpec(train=list(X.unbind()), shuffle=False)


def _model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def _config(schedule: list[dict[str, int]], size: int = 8, **trainer: Any) -> RunConfig:
    groups = {
        "batch": {"global_size": size, "micro_size": 2, "schedule": schedule},
        "optim": {"lr": 0.05, "clip_norm": None, "optimizer": {"_target_": "torch.optim.SGD", "momentum": 0.9}},
        "schedule": {"_target_": "distaccum.train.schedules.Cosine", "warmup_steps": WARMUP},
    }
    trainer = {"max_steps": None, "max_epochs": EPOCHS, "log_every": 1, **trainer}
    return settings(None, trainer, save=3, resume="auto", **groups)


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
