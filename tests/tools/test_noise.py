"""The gradient noise scale beside the samples' own gradients; ``test_arriving.py`` has it exactly, by engines."""

from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

from distaccum import DataSpec, InfoNCE, PrecisionConfig, RunConfig, ScalerConfig, Trainer
from distaccum.distributed.world import World
from distaccum.errors import ConfigError
from distaccum.models.gpt import GPT
from distaccum.tools.noise import GradientNoise
from distaccum.train.components import build_components
from tests.support.accumulators import Loss, over_sgd
from tests.support.commands import metrics
from tests.support.runs import settings
from tests.support.threads import on_ranks

SAMPLES, BATCH, MICRO, EPOCHS = 512, 32, 4, 3
FP16 = PrecisionConfig(name="fp16", scaler=ScalerConfig(static_scale=1024))


def regression() -> tuple[nn.Module, Tensor, Any]:
    x = torch.randn(SAMPLES, 8)
    target = x[:, :2].sum(1, keepdim=True) + 0.7 * torch.randn(SAMPLES, 1)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    return model, torch.cat([x, target], 1), lambda of, rows: (of(rows[:, :8]) - rows[:, 8:]).square()


def images() -> tuple[nn.Module, Tensor, Any]:
    x = torch.randn(SAMPLES, 37)
    x[:, 36] = x[:, :6].sum(1) > 0
    model = nn.Sequential(nn.Unflatten(1, (1, 6, 6)), nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    return model, x, lambda of, rows: cross_entropy(of(rows[:, :36]), rows[:, 36].long(), reduction="none")


def text() -> tuple[nn.Module, Tensor, Any]:
    """Of which tokens are counted, eight a sample."""
    model = GPT(vocab_size=11, seq_len=8, n_layer=1, n_head=1, n_embd=8, dropout=0.0)

    def losses(of: Any, rows: Tensor) -> Tensor:
        return cross_entropy(of(rows[:, :-1].long()).mT, rows[:, 1:].long(), reduction="none")

    return model, torch.randint(7, 11, (SAMPLES, 9)).float(), losses


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.filterwarnings("ignore:precision=fp16")
@pytest.mark.parametrize(("case", "precision"), [(regression, FP16), (images, "fp32"), (text, "fp32")])
def test_it_is_that_of_the_samples_own_gradients(case: Any, precision: Any, gloo_world: World) -> None:
    torch.manual_seed(0)
    model, data, losses = case()
    trained, model, data = deepcopy(model), model.double(), data.double()
    items = losses(model, data[:1]).numel()

    def of_sample(weights: dict[str, Tensor], row: Tensor) -> Tensor:
        total: Tensor = losses(lambda x: functional_call(model, weights, (x,)), row[None]).sum()
        return total

    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    each = vmap(grad(of_sample), in_dims=(None, 0))(weights, data)
    rows = torch.cat([part.flatten(1) for part in each.values()], 1) / items
    given = {"count": lambda batch: len(batch) * items, "verify": "never", "precision": precision}
    acc = over_sgd(trained, 0.0, (BATCH, MICRO), **given)
    noise = GradientNoise(acc, decay=1.0)
    acc.engine.hooks.add(noise)
    for _ in range(EPOCHS):
        for batch in acc.batches(DataSpec(train=list(data.float()))):
            with acc.accumulate():
                acc.backward(losses(acc.model, batch).sum())
    true = items * float(rows.var(0).sum() / rows.mean(0).square().sum())
    assert noise.metrics["noise_scale"] == pytest.approx(true, rel=0.15)


BATCHES = {"global_size": 8, "noise": True}
DATA = DataSpec(train=list(torch.randn(40, 3, generator=torch.Generator().manual_seed(0))))


def _fit(folder: Path, steps: int, **more: Any) -> list[Any]:
    """The records' noise; with the same weights to begin with."""
    torch.manual_seed(0)
    config = settings(None, {"max_steps": steps, "log_every": 1}, batch={**BATCHES, "micro_size": 2}, **more)
    Trainer(nn.Linear(3, 1), Loss(), DATA, config=config, run_dir=folder).fit()
    return [{key: one[key] for key in one if key.startswith("noise")} for one in metrics(folder)]


def test_a_run_logs_it_and_a_resume_goes_on_bit_by_bit(tmp_path: Path, gloo_world: World) -> None:
    whole = _fit(tmp_path / "whole", 7)
    assert ["noise_scale_trace" in record for record in whole] == [False, False, *[True] * 5]
    _fit(tmp_path / "parted", 4, save=2)
    assert _fit(tmp_path / "parted", 7, resume="auto") == whole
    acc = over_sgd(nn.Linear(3, 1), 0.1, (4, 2), count=lambda batch: {"a": len(batch), "b": 1})
    acc.engine.hooks.add(GradientNoise(acc))
    with pytest.raises(ConfigError, match=r"the losses have the counts \{'a': 4.0, 'b': 2.0\}"):
        next(acc.windows(DataSpec(train=list(torch.ones(4, 3)))))


@pytest.mark.parametrize(
    ("micro", "loss", "problem"),
    [(8, Loss(), "one rank runs each step as one micro-batch"), (2, InfoNCE(), "InfoNCE compares the samples of a")],
)
def test_what_has_none_is_refused_before_there_are_ranks(micro: int, loss: Any, problem: str) -> None:
    config = RunConfig.from_dict({"batch": {**BATCHES, "micro_size": micro}})
    with pytest.raises(ConfigError, match=rf"batch\.noise=True: {problem}"):
        build_components(config, DATA, nn.Linear(3, 1), loss, world_size=1, device=torch.device("cpu"))


MODEL = nn.Linear(3, 1)


def _measured(windows: int, state: dict[str, Any] | None, world: World) -> tuple[list[dict[str, float]], Any]:
    """The noise after each of so many windows of an epoch of five, and what is saved then."""
    acc = over_sgd(deepcopy(MODEL), 0.1, (8, 1), count=len, world=world, verify="never")
    noise = GradientNoise(acc, decay=0.8)
    acc.add_hook(noise)
    found: list[dict[str, float]] = []
    if state is not None:
        acc.load_state_dict(state)
    for window in acc.windows(DATA):
        acc.step(window, Loss())
        found.append(dict(noise.metrics))
        if len(found) == windows:
            break
    saved = acc.state_dict()
    acc.close()
    return found, saved


def test_it_goes_on_from_what_other_ranks_have_added_up() -> None:
    whole = on_ranks(2, partial(_measured, 5, None))[0][0]
    (_, saved), _ = on_ranks(2, partial(_measured, 3, None))
    for world in (1, 2, 3):
        for found, _ in on_ranks(world, partial(_measured, 2, saved)):
            for one, other in zip(found, whole[3:], strict=True):
                assert one == (other if world == 2 else pytest.approx(other, rel=1e-6))
    del saved["hooks"]  # as of an older distaccum
    assert on_ranks(2, partial(_measured, 1, saved))[0][0] == [{}]
