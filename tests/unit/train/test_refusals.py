"""What a Trainer is given and cannot use is refused before the run; what callbacks do is held to rules."""

import json
import logging
import math
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau as TorchPlateau

from distaccum import CrossEntropy, DataSpec, RunConfig, Trainer
from distaccum.distributed.world import World
from distaccum.engines.factory import create_engine
from distaccum.errors import CheckpointError, ConfigError, MisuseError
from distaccum.train.callbacks import Callback, EarlyStopping, ReduceLROnPlateau, Run
from tests.support.runs import settings


def _samples(size: int, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 4, generator=generator)
    return [(row, row[:3].argmax()) for row in x]


SOURCE = DataSpec(train=_samples(40, 0), eval_dataset=_samples(8, 1), description="")


def _config(**values: Any) -> RunConfig:
    trainer = {"max_steps": 6, "log_every": 1, "eval_every": 1} | values.pop("trainer", {})
    return settings((8, 3), trainer, save=2, checkpoint={"keep": 0}, optim={"lr": 0.05}, **values)


def _trainer(folder: Path, **given: Any) -> Trainer:
    torch.manual_seed(0)
    model = given.pop("model", None) or nn.Linear(4, 3)
    loss, data = given.pop("loss", CrossEntropy()), given.pop("data", SOURCE)
    config = given.pop("config", None) or _config(**given.pop("groups", {}))
    return Trainer(model, loss, data, run_dir=folder, config=config, **given)


class Countless:
    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0]).sum()  # type: ignore[no-any-return]


class Swapped(Countless):
    def count(self, batch: Any) -> int:
        return len(batch[1])

    def __call__(self, prediction: Tensor, target: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
        return prediction.sum()


class Uncounted(Countless):
    def count(self) -> int:
        return 1


class Callless:
    def count(self, batch: Any) -> int:
        return len(batch[1])


LOSSES: dict[str, tuple[Any, str]] = {
    "no count": (Countless(), r"loss=Countless: has no count\(batch\), the number of labels"),
    "torch's": (nn.CrossEntropyLoss(), r"loss=CrossEntropyLoss: has no count\(batch\).*distaccum\.CrossEntropy"),
    "a function": (nn.functional.cross_entropy, r"loss=cross_entropy: has no count\(batch\)"),
    "a class": (CrossEntropy, r"loss=CrossEntropy: is a class. Make an object of it, as in CrossEntropy\(\)"),
    "other arguments": (Swapped(), r"loss=Swapped: __call__ takes other arguments .*__call__\(self, model, batch\)"),
    "a count without a batch": (Uncounted(), r"loss=Uncounted: count takes other arguments"),
    "no call": (Callless(), r"loss=Callless: cannot be called"),
    "None": (None, r"loss=NoneType: has no count"),
    "text": ("mean", r"loss=str: cannot be called"),
}


def test_the_command_line_refuses_it_too(tmp_path: Path) -> None:
    from distaccum.train.components import components_from_config  # noqa: PLC0415

    config = _config(
        model={"_target_": "torch.nn.Linear", "in_features": 4, "out_features": 3},
        data={"_target_": "distaccum.data.datasets.digits.digits", "held_out": 0.2},
        loss={"_target_": "torch.nn.CrossEntropyLoss"},
    )
    with pytest.raises(ConfigError, match=r"loss=CrossEntropyLoss: has no count\(batch\)"):
        components_from_config(config, world_size=1, device=torch.device("cpu"))


class Misspelt(Callback):
    def on_step_ends(self, run: Run, outcome: Any) -> None: ...


class OfLightning(Callback):
    def on_train_epoch_end(self, trainer: Any, module: Any) -> None: ...


class Nearly(Callback):
    def on_evaluate(self, run: Run, results: Any) -> None: ...


class FewArguments(Callback):
    def on_skip(self, outcome: Any) -> None: ...  # type: ignore[override]


class Tensors(Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"ema": torch.zeros(2)}


class Duck:
    def on_update(self, run: Run, outcome: Any) -> None: ...


CALLBACKS: dict[str, tuple[Any, str]] = {
    "misspelt": (
        Misspelt(),
        r"callbacks=Misspelt: nobody calls on_step_ends.*The hooks are on_update, on_skip, on_eval",
    ),
    "another framework's": (OfLightning(), r"callbacks=OfLightning: nobody calls on_train_epoch_end"),
    "nearly": (Nearly(), r"callbacks=Nearly: nobody calls on_evaluate; did you mean on_eval or"),
    "few arguments": (
        FewArguments(),
        r"FewArguments: on_skip takes other arguments. Write def on_skip\(self, run, out",
    ),
    "state that is no JSON": (Tensors(), r"callbacks=Tensors: its state_dict\(\) holds what JSON cannot"),
    "no callback": (Duck(), r"callbacks=Duck: is no callback. Inherit from distaccum\.Callback"),
    "a class": (EarlyStopping, r"callbacks=the class EarlyStopping: is no callback"),
    "a function": (lambda run, outcome: None, r"is no callback"),
}


@pytest.mark.parametrize("callback", [EarlyStopping(), ReduceLROnPlateau()], ids=lambda c: type(c).__name__)
def test_one_that_waits_for_evaluations_needs_some(callback: Callback, tmp_path: Path) -> None:
    for given in ({"data": _samples(16, 0)}, {"config": _config(trainer={"eval_every": 0})}):
        with pytest.raises(ConfigError, match="waits for evaluations, and this run makes none"):
            _trainer(tmp_path, callbacks=[callback], **given)


def test_state_that_is_no_json_later_names_its_callback(gloo_world: World, tmp_path: Path) -> None:
    class Later(Callback):
        kept: Any = 0

        def state_dict(self) -> dict[str, Any]:
            return {"kept": self.kept}

        def on_eval(self, run: Run, results: Mapping[str, float]) -> None:
            self.kept = torch.zeros(1)

    with pytest.raises(CheckpointError, match=r"callbacks=Later-0: its state_dict\(\) holds what JSON cannot"):
        _trainer(tmp_path, callbacks=[Later()]).fit()


Metric = type("Metric", (), dict.fromkeys(("update", "compute", "reset"), print))  # as torchmetrics' have them
METRICS: dict[str, tuple[Any, Any, str]] = {
    "a function": (
        {"acc": lambda p, t: (p.argmax(-1) == t).float().mean()},
        SOURCE,
        "metrics.acc=function: has no upd",
    ),
    "a class": ({"acc": Metric}, SOURCE, "is a class. Give objects of torchmetrics"),
    "nothing held out": (
        {"acc": Metric()},
        DataSpec(train=_samples(8, 0), eval_dataset=None, description=""),
        "acc would never be computed: the data holds nothing out",
    ),
}


class Scores(CrossEntropy):
    def __init__(self, value: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.value = value

    def scores(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        return {"loss": self(model, batch), "accuracy": self.value(model(batch[0]).argmax(-1) == batch[1])}


@pytest.mark.parametrize(
    ("value", "expected"),
    [(lambda hit: hit.float(), "score 'accuracy' has shape"), (lambda hit: hit.sum().item(), "'accuracy': int")],
)
def test_a_score_that_is_no_sum_is_named(value: Any, expected: str, gloo_world: World, tmp_path: Path) -> None:
    with pytest.raises(MisuseError, match=expected):
        _trainer(tmp_path, loss=Scores(value)).fit()


SCHEDULES: dict[str, tuple[dict[str, Any], str]] = {
    "a plateau": (
        {"_target_": "torch.optim.lr_scheduler.ReduceLROnPlateau"},
        r"is a scheduler of an optimizer.*Use callbacks=plateau",
    ),
    "torch's, with more than rates": (
        {"_target_": "torch.optim.lr_scheduler.OneCycleLR", "max_lr": 0.1},
        "sets momentum too, and a schedule sets rates",
    ),
    "nothing that is there": (
        {"_target_": "distaccum.train.schedules.Nope"},
        r"schedule\._target_=.*cannot be imported",
    ),
    "nothing to call": ({"_target_": "builtins.dict"}, "gives None for the first update"),
    "not a number": ({"_target_": "tests.unit.train.test_refusals.nowhere"}, "gives nan for the first update"),
}


def nowhere(*, total_steps: int) -> Callable[[int], float]:
    """A schedule that divides by nothing."""
    return lambda _: math.nan


def test_an_optimizer_that_would_train_nothing_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(4, 3)
    groups = [{"params": [model.weight], "lr": 0.0}, {"params": [model.bias], "lr": 0.1}]
    _trainer(tmp_path, model=model, optimizer=SGD(groups, lr=0.1))  # one group may stay
    assert "learning rate" not in caplog.text
    _trainer(tmp_path, model=model, optimizer=SGD(model.parameters(), lr=0.0))
    assert "every learning rate of the optimizers is 0: nothing will be trained" in caplog.text


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_a_parameter_that_stands_in_it_twice_is_refused(gloo_world: World) -> None:
    model = nn.Linear(4, 3)
    with pytest.raises(ConfigError, match="1 of its parameters stand in it twice, and would be stepped twice"):
        create_engine(model, SGD([*model.parameters(), model.weight], lr=0.1), gloo_world)


def test_a_parameter_that_no_optimizer_holds_is_named(gloo_world: World, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3))
    create_engine(model, SGD(model[1].parameters(), lr=0.1), gloo_world).close()
    assert "0.weight, 0.bias: no optimizer holds, though they need a gradient" in caplog.text
    caplog.clear()
    model[0].requires_grad_(False)
    create_engine(model, SGD(model[1].parameters(), lr=0.1), gloo_world)
    create_engine(nn.Linear(2, 2), [], gloo_world)  # nobody steps it at all
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


class ByHand(Callback):
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


class SetsRate(ByHand):
    def on_eval(self, run: Run, results: Mapping[str, float]) -> None:
        self.optimizer.param_groups[0]["lr"] *= 0.1


class Steps(ByHand):
    def on_update(self, run: Run, outcome: Any) -> None:
        self.optimizer.step()


@pytest.mark.parametrize(
    ("kind", "message"),
    [(SetsRate, r"SetsRate sets a learning rate by hand.*property lr_factor"), (Steps, r"step\(\)")],
)
def test_a_callback_that_does_it_by_hand_is_told_how(
    gloo_world: World, tmp_path: Path, kind: type[ByHand], message: str
) -> None:
    """The schedule set the rate again before the next step: the callback's was lost without a word."""
    model = nn.Linear(4, 3)
    optimizer = SGD(model.parameters(), lr=0.1)
    with pytest.raises(MisuseError, match=message):
        _trainer(tmp_path, model=model, optimizer=optimizer, callbacks=[kind(optimizer)]).fit()


class Halves(Callback):
    evaluations = 0

    @property
    def lr_factor(self) -> float:
        return 0.5**self.evaluations

    def on_eval(self, run: Run, results: Mapping[str, float]) -> None:
        self.evaluations += 1

    def state_dict(self) -> dict[str, Any]:
        return {"evaluations": self.evaluations}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.evaluations = state["evaluations"]


def _rates(folder: Path) -> list[float]:
    return [json.loads(line)["lr"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_its_factor_multiplies_the_schedules_and_a_resumed_run_goes_on(gloo_world: World, tmp_path: Path) -> None:
    expected = [0.05 * 0.5**i for i in range(6)]
    _trainer(tmp_path / "whole", callbacks=[Halves()]).fit()
    assert _rates(tmp_path / "whole") == pytest.approx(expected)
    for steps in (2, 4, 6):
        config = _config(resume="auto", trainer={"max_steps": steps})
        _trainer(tmp_path / "parts", callbacks=[Halves()], config=config).fit()
    assert _rates(tmp_path / "parts") == pytest.approx(expected)
    last = [(tmp_path / name / "checkpoints/step-6/model.safetensors").read_bytes() for name in ("whole", "parts")]
    assert last[0] == last[1]


@pytest.mark.parametrize("seed", range(12))
def test_the_plateau_counts_as_torchs(seed: int) -> None:
    draw = random.Random(seed)  # noqa: S311
    larger, relative = draw.random() < 0.5, draw.random() < 0.5
    shared: dict[str, Any] = {
        "factor": draw.choice([0.1, 0.5]),
        "patience": draw.choice([0, 1, 3]),
        "threshold": draw.choice([1e-4, 0.1]),
        "threshold_mode": "rel" if relative else "abs",
        "cooldown": draw.choice([0, 2]),
    }
    optimizer = SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    floor = draw.choice([0.0, 0.03])
    theirs = TorchPlateau(optimizer, mode="max" if larger else "min", min_lr=floor, eps=0.0, **shared)
    ours = ReduceLROnPlateau(larger_is_better=larger, min_factor=floor, **shared)
    for i in range(60):
        value = draw.choice([draw.uniform(0.5, 2.0), math.nan if draw.random() < 0.1 else 1.0])
        theirs.step(value)
        ours.on_eval(None, {"eval_loss": value})  # type: ignore[arg-type]
        assert ours.lr_factor == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)
        if i == 30:
            state, ours = ours.state_dict(), ReduceLROnPlateau(larger_is_better=larger, min_factor=floor, **shared)
            ours.load_state_dict(json.loads(json.dumps(state)))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"factor": 1.0}, "callbacks.plateau.factor=1.0"),
        ({"min_factor": -0.1}, "callbacks.plateau.min_factor"),
        ({"patience": -1}, "callbacks.plateau.patience"),
        ({"threshold_mode": "relative"}, "callbacks.plateau.threshold_mode"),
    ],
)
def test_a_plateau_out_of_range_is_refused(given: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        ReduceLROnPlateau(**given)


class MeanScores(CrossEntropy):
    """Its accuracy is the mean of the batch; it was divided by the count of all batches."""

    def scores(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        hit = model(batch[0]).argmax(-1) == batch[1]
        return {"loss": self(model, batch), "accuracy": hit.float().mean(), "hits": hit.sum()}


class SumScores(MeanScores):
    def scores(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        hit = model(batch[0]).argmax(-1) == batch[1]
        return {"loss": self(model, batch), "accuracy": hit.sum(), "none": 0 * hit.sum()}


def test_a_score_that_is_a_mean_is_named_in_the_first_evaluation(gloo_world: World, tmp_path: Path) -> None:
    with pytest.raises(MisuseError, match=r"scores\(\) of MeanScores gives means for accuracy, and they are divided"):
        _trainer(tmp_path / "means", loss=MeanScores()).fit()
    own = _trainer(tmp_path / "sums", loss=SumScores()).fit()
    assert own["eval_accuracy"] == _trainer(tmp_path / "ours").fit()["eval_accuracy"]


class Temperature(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def count(self, batch: Any) -> int:
        return len(batch[1])

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]) * self.scale, batch[1], reduction="sum")


def test_parameters_of_a_loss_belong_to_the_model(gloo_world: World, tmp_path: Path) -> None:
    """Nobody reduced, stepped or saved them."""
    loss = Temperature()
    with pytest.raises(ConfigError, match="loss=Temperature: trains scale, which are not the model's"):
        _trainer(tmp_path, loss=loss)
    model = nn.Linear(4, 3)
    model.register_parameter("temperature", loss.scale)
    _trainer(tmp_path, loss=loss, model=model).fit()
    assert loss.scale.item() != 1.0


def test_another_optimizer_than_the_checkpoints_is_refused(gloo_world: World, tmp_path: Path) -> None:
    """AdamW's moments lay unused beside a momentum that began with nothing; the other way round was a KeyError."""
    kinds: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "SGD": lambda p: SGD(p, lr=0.01, momentum=0.9),
        "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    }
    for before, now in (("SGD", "AdamW"), ("AdamW", "SGD")):
        folder = tmp_path / before
        model = nn.Linear(4, 3)
        _trainer(folder, model=model, optimizer=kinds[before](model.parameters())).fit()
        config = _config(resume="auto", trainer={"max_steps": 8})
        with pytest.raises(ConfigError, match=f"optimizer={now}: and .*step-6 has the state of {before}"):
            _trainer(folder, model=model, optimizer=kinds[now](model.parameters()), config=config).fit()


class Counting(SGD):
    """Keeps a number of the whole optimizer, which decides how far a step goes."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.state["steps"] = self.state.get("steps", 0) + 1  # type: ignore[index]
        for group in self.param_groups:
            group["lr"] /= self.state["steps"]  # type: ignore[index]
        super().step()


@pytest.mark.parametrize("engine", ["ddp", "zero1"])
def test_what_an_optimizer_keeps_of_no_parameter_is_saved(engine: str, gloo_world: World, tmp_path: Path) -> None:
    """It was lost without a word: a resumed run began to count again."""
    content = []
    for name, parts in (("whole", (4,)), ("parts", (2, 4))):
        for steps in parts:
            torch.manual_seed(0)
            model = nn.Linear(4, 3)
            optimizer = Counting(model.parameters(), lr=0.1)
            config = _config(resume="auto", trainer={"max_steps": steps})
            _trainer(tmp_path / name, model=model, optimizer=optimizer, config=config, engine=engine).fit()
        assert optimizer.state["steps"] == 4  # type: ignore[index]
        content.append((tmp_path / name / "checkpoints/step-4/model.safetensors").read_bytes())
    assert content[0] == content[1]


def test_a_schedule_that_falls_below_zero_is_stopped_there(gloo_world: World, tmp_path: Path) -> None:
    """A negative rate ascends: before the run where its first looks show it, else before the update."""
    config = {"trainer": {"max_steps": 300}, "schedule": {"_target_": "tests.unit.train.test_refusals.falling"}}
    with pytest.raises(MisuseError, match=r"factor of the learning rate after 4 updates is -0.3.*let it end at 0"):
        _trainer(tmp_path, config=_config(**config)).fit()
    assert _rates(tmp_path)[-1] == 0.0


def falling(*, total_steps: int) -> Callable[[int], float]:
    """A linear decay that forgets how long the run is, between two looks at every third update."""
    return lambda step: 1 - step / 3 if step % 3 else max(0.0, 1 - step / 3)


GIVEN: dict[str, tuple[dict[str, Any], str]] = {
    **{f"loss: {case}": ({"loss": loss}, said) for case, (loss, said) in LOSSES.items()},
    **{f"callback: {case}": ({"callbacks": [callback]}, said) for case, (callback, said) in CALLBACKS.items()},
    **{f"metric: {case}": ({"metrics": given, "data": data}, said) for case, (given, data, said) in METRICS.items()},
    **{f"schedule: {case}": ({"groups": {"schedule": node}}, said) for case, (node, said) in SCHEDULES.items()},
    "a lazy layer": ({"model": nn.Sequential(nn.LazyLinear(3))}, "0.weight, 0.bias get their shapes in the first forw"),
    "a class": ({"optimizer": SGD}, "optimizer=the class SGD: is no torch.optim.Optimizer"),
    "a scheduler": (
        {"optimizer": torch.optim.lr_scheduler.StepLR(SGD([nn.Parameter(torch.ones(1))], lr=0.1), 2)},
        "optimizer=StepLR: is a scheduler",
    ),
    "a callback's setting": (
        {
            "groups": {
                "callbacks": {"early_stop": {"_target_": "distaccum.train.callbacks.EarlyStopping", "patience": 0}}
            }
        },
        "patience=0",
    ),
    "one callback": ({"callbacks": EarlyStopping()}, "callbacks=EarlyStopping: is no list"),
    "a stream held out": (
        {"data": DataSpec(train=_samples(8, 0), eval_dataset=iter([]), description="x")},  # type: ignore[arg-type]
        "data=x: holds out a list_iterator without a length",
    ),
}


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize("case", GIVEN)
def test_what_cannot_be_used_is_named(case: str, tmp_path: Path) -> None:
    given, expected = GIVEN[case]
    with pytest.raises(ConfigError, match=expected) as caught:
        _trainer(tmp_path, **given)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


class StopsWithoutAWord(Callback):
    def on_eval(self, run: Run, results: Mapping[str, float]) -> None:
        run.stop("")


def test_a_callback_that_stops_without_a_reason_stops(gloo_world: World, tmp_path: Path) -> None:
    _trainer(tmp_path, callbacks=[StopsWithoutAWord()]).fit()
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["step"], status["reason"]) == (1, "a callback asked to stop")
