"""The moving average of the weights, against a loop that is written here: kept, saved, evaluated, exported."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from distaccum import Callback, ConfigError, DataSpec, RunConfig, Trainer
from distaccum.errors import CheckpointError
from distaccum.tools.export import export
from distaccum.train import ema
from distaccum.train.ema import EMA
from tests.support.commands import metrics
from tests.support.runs import settings

pytestmark = pytest.mark.usefixtures("gloo_world")
DATA: Any = list(torch.randn(64, 3, generator=torch.Generator().manual_seed(0)).unbind())
BAD = 2  # the window that is not applied
MARK = 50.0
DECAY = 0.8


class Loss:
    """Squares; infinite where a sample says so, with finite statistics of the batch."""

    def count(self, batch: Tensor) -> int:
        return len(batch)

    def __call__(self, model: nn.Module, batch: Tensor) -> Tensor:
        total: Tensor = (model(batch) - 1).square().sum()
        return total * torch.inf if bool((batch == MARK).any()) else total


def _data(*, bad: bool = True) -> DataSpec:
    train = [sample.clone() for sample in DATA]
    if bad:
        train[4 * BAD][0] = MARK
    return DataSpec(train=train, eval_dataset=DATA[:8], description="in order", shuffle=False)


def _model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    model[0].bias.requires_grad_(False)
    return model


def _fit(run_dir: Path, steps: int, *callbacks: Callback, data: DataSpec | None = None, **more: Any) -> nn.Module:
    trainer = {"max_steps": steps, "log_every": 1, "eval_every": 2, "nonfinite": "skip", "verify": "never"}
    config = settings((4, 4), trainer, save=2, checkpoint={"keep": 0}, optim={"clip_norm": None}, **more)
    model = _model()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    given: Any = {"optimizer": optimizer, "config": config, "callbacks": list(callbacks)}
    Trainer(model, Loss(), data or _data(), run_dir=run_dir, **given).fit()
    return model


def _expected(steps: int, *, warmup: bool = False) -> tuple[nn.Module, dict[str, Tensor], dict[str, Tensor]]:
    """In fp64: the model, its averages, and what moved by counting the skipped window too."""
    model = _model().double()
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    averages, wrong = ({name: p.detach().clone() for name, p in named.items()} for _ in range(2))
    done = window = 0
    while done < steps:
        batch = torch.stack(DATA[4 * window : 4 * window + 4]).double()
        if window != BAD:
            done += 1
            gradients = torch.autograd.grad(Loss()(model, batch) / 4, list(named.values()))
            with torch.no_grad():
                for p, gradient in zip(named.values(), gradients, strict=True):
                    p.sub_(0.05 * gradient)
            decay = min(DECAY, (1 + done) / (10 + done)) if warmup else DECAY
            for name, p in named.items():
                averages[name] = decay * averages[name] + (1 - decay) * p.detach()
        for name, p in named.items():
            wrong[name] = DECAY * wrong[name] + (1 - DECAY) * p.detach()
        window += 1
    return model, averages, wrong


def _off(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max(float((found[name] - value).abs().max()) for name, value in expected.items())


@pytest.mark.parametrize("warmup", [False, True], ids=["constant", "warm-up"])
def test_it_moves_with_applied_updates_alone(warmup: bool, tmp_path: Path) -> None:
    average = EMA(decay=DECAY, warmup=warmup)
    _fit(tmp_path, 6, average)
    _, expected, wrong = _expected(6, warmup=warmup)
    found = load_file(tmp_path / "checkpoints" / "step-6" / "ema.safetensors")
    assert found.keys() == expected.keys() == {"0.weight", "1.weight", "1.bias", "2.weight", "2.bias"}
    assert _off(found, expected) < 1e-6
    assert _off(found, wrong) > 1e-3
    assert average.state_dict() == {"updates": 6, "evaluate": False}
    assert metrics(tmp_path)[-1]["skipped"] == 1


def test_a_resumed_run_goes_on_bit_by_bit(tmp_path: Path) -> None:
    weights = _fit(tmp_path / "whole", 6, EMA(decay=DECAY)).state_dict()
    _fit(tmp_path / "parts", 4, EMA(decay=DECAY))
    again = _fit(tmp_path / "parts", 6, EMA(decay=DECAY), resume="auto").state_dict()
    assert all(torch.equal(again[name], value) for name, value in weights.items())
    files = [load_file(tmp_path / run / "checkpoints" / "step-6" / "ema.safetensors") for run in ("whole", "parts")]
    assert all(torch.equal(files[1][name], value) for name, value in files[0].items())


def test_a_run_without_one_goes_on_with_its_weights(tmp_path: Path) -> None:
    _fit(tmp_path, 2)
    average = EMA(decay=0.0)
    _fit(tmp_path, 4, average, resume="auto")
    saved = tmp_path / "checkpoints" / "step-4"
    found, weights = (load_file(saved / f"{kind}.safetensors") for kind in ("ema", "model"))
    assert all(torch.equal(weights[name], value) for name, value in found.items())  # of a decay of 0
    _fit(tmp_path, 6, resume="auto")
    assert not (tmp_path / "checkpoints" / "step-6" / "ema.safetensors").exists()


class _Evaluated(Callback):
    """Keeps the results, and the weights as they are after an evaluation."""

    def __init__(self) -> None:
        self.results: list[float] = []

    def on_eval(self, run: Any, results: Any) -> None:
        self.results.append(results["eval_loss"])


def test_the_average_is_evaluated_and_the_weights_put_back(tmp_path: Path) -> None:
    told, plain = _Evaluated(), _Evaluated()
    averaged = _fit(tmp_path / "average", 6, EMA(decay=DECAY, evaluate=True), told)
    trained = _fit(tmp_path / "weights", 6, plain)
    ours, theirs = averaged.state_dict(), trained.state_dict()
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())
    model, averages, _ = _expected(6)
    expected = []
    for values in (averages, {}):
        model.load_state_dict({name: value.double() for name, value in theirs.items()} | values)
        model.eval()
        with torch.no_grad():
            expected.append(Loss()(model, torch.stack(DATA[:8]).double()).item() / 8)
    assert [told.results[-1], plain.results[-1]] == pytest.approx(expected, rel=1e-5)
    assert abs(expected[0] - expected[1]) > 1e-3


def test_an_evaluation_that_fails_leaves_the_weights(tmp_path: Path) -> None:
    class Raises(Loss):
        def scores(self, model: nn.Module, batch: Tensor) -> Any:
            raise RuntimeError("no scores")

    average = EMA(decay=DECAY, evaluate=True)
    model = _model()
    config = {"trainer": {"eval_every": 1, "verify": "never"}, "metrics": {"console": False}}
    sizes: Any = {"global_batch_size": 4, "micro_batch_size": 4, "max_steps": 1, "run_dir": tmp_path}
    trainer = Trainer(
        model,
        Raises(),
        _data(bad=False),
        config=RunConfig.from_dict(config),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        callbacks=[average],
        **sizes,
    )
    with pytest.raises(RuntimeError, match="no scores"):
        trainer.fit()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), _model().parameters(), strict=True))


def test_it_is_exported_beside_what_has_none(tmp_path: Path) -> None:
    _fit(tmp_path, 6, EMA(decay=DECAY))
    saved = tmp_path / "checkpoints" / "step-6"
    export(saved, tmp_path / "ema.safetensors", weights="ema")
    found, averages = load_file(tmp_path / "ema.safetensors"), load_file(saved / "ema.safetensors")
    model = load_file(saved / "model.safetensors")
    assert found.keys() == model.keys()
    assert all(torch.equal(value, averages.get(name, model[name])) for name, value in found.items())
    _fit(tmp_path / "without", 2)
    with pytest.raises(CheckpointError, match="has no ema: it is kept by a run with callbacks=ema"):
        export(tmp_path / "without" / "checkpoints" / "step-2", tmp_path / "none.safetensors", weights="ema")


def test_what_it_cannot_average_is_refused() -> None:
    for decay in (1.0, -0.1, float("nan"), "0.9", True):
        with pytest.raises(ConfigError, match=r"callbacks\.ema\.decay=.*from 0, and below 1"):
            EMA(decay=decay)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="there are 2 of them"):
        ema.check([EMA(), EMA()], RunConfig())
    for engine, precision in (("deepspeed", "bf16"), ("ddp", "bf16-weights"), ("zero1", "bf16-weights")):
        config = RunConfig.from_dict({"engine": {"name": engine}, "precision": {"name": precision}})
        with pytest.raises(ConfigError, match=rf"the fp32 weights elsewhere, or in parts \(engine={engine}\)"):
            ema.check([EMA()], config)
    stage3 = RunConfig.from_dict({"engine": {"name": "deepspeed", "stage": 3}})
    with pytest.raises(ConfigError, match="elsewhere, or in parts"):
        ema.check([EMA()], stage3)
    ema.check([EMA()], RunConfig.from_dict({"engine": {"name": "fsdp2"}, "precision": {"name": "bf16-weights"}}))
    ema.check([EMA()], RunConfig.from_dict({"engine": {"name": "deepspeed", "stage": 2}}))


class _LooksAfterwards(Callback):
    """Keeps what the model says before and after each evaluation."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.said: list[list[Tensor]] = [[], []]

    @torch.no_grad()
    def _ask(self) -> Tensor:
        self._model.eval()
        found: Tensor = self._model(torch.stack(DATA[:4]))
        self._model.train()
        return found.clone()

    def on_update(self, run: Any, outcome: Any) -> None:
        self.said[0].append(self._ask())

    def on_eval(self, run: Any, results: Any) -> None:
        self.said[1].append(self._ask())


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_after_an_evaluation_forwards_are_of_the_weights_again(engine: str, tmp_path: Path) -> None:
    """Where a model is sharded a forward may leave weights gathered: those of before the exchange."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    looks, told = _LooksAfterwards(model), _Evaluated()
    trainer = {"max_steps": 3, "eval_every": 1, "verify": "never"}
    Trainer(
        model,
        Loss(),
        _data(bad=False),
        run_dir=tmp_path,
        config=settings((4, 4), trainer, engine={"name": engine}, schedule={}),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05),
        callbacks=[EMA(decay=0.999999, evaluate=True), looks, told],
    ).fit()
    before, after = looks.said
    assert len(before) == len(after) == 3
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert max(told.results) - min(told.results) < 1e-3  # of weights that hardly move
    assert not torch.allclose(before[0], before[-1])
