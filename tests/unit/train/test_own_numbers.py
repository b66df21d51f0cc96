"""Numbers of one's own, and metrics that give more than one number: what is taken, and what is refused in words."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from distaccum import DataSpec, EarlyStopping, RunConfig, Trainer
from distaccum.config.direction import known_mode
from distaccum.distributed.world import World
from distaccum.errors import ConfigError, MisuseError
from distaccum.losses.cross_entropy import CrossEntropy
from distaccum.tools.hugging_face import class_names
from distaccum.tools.metric_results import MetricResults
from distaccum.train.callbacks import Callback, Run

SAMPLES = [(torch.eye(4)[i % 4], torch.tensor(i % 3)) for i in range(8)]
DATA = DataSpec(train=SAMPLES, eval_dataset=SAMPLES)


class Gives:
    """A metric that computes what it is given, the first time perhaps another thing."""

    def __init__(self, *values: Any) -> None:
        self._values = list(values)

    def update(self, predictions: Any, targets: Any) -> None:
        pass

    def compute(self) -> Any:
        return self._values.pop(0) if len(self._values) > 1 else self._values[0]

    def reset(self) -> None:
        pass


def _trainer(folder: Path, *, loss: Any = None, best: str | None = None, **given: Any) -> Trainer:
    values = {
        "trainer": {"log_every": 1, "eval_every": 2},
        "checkpoint": {"best": best},
        "metrics": {"console": False, "wandb": {"mode": "disabled"}},
    }
    sizes = {"global_batch_size": 4, "micro_batch_size": 4, "max_steps": 2}
    config = RunConfig.from_dict(values)
    return Trainer(nn.Linear(4, 3), loss or CrossEntropy(), DATA, config=config, run_dir=folder, **sizes, **given)


@pytest.mark.parametrize(
    ("value", "classes", "expected"),
    [
        (0.5, (), ({"f": 0.5}, {})),
        (torch.tensor([0.5]), ("cat",), ({"f": 0.5}, {})),
        (torch.tensor([0.25, 1.0]), ("cat", "dog"), ({"f/cat": 0.25, "f/dog": 1.0}, {})),
        (np.array([1, 2], dtype=np.int64), ("cat", "cat"), ({"f/0": 1.0, "f/1": 2.0}, {})),
        ([0.5, 1.0, 1.5], ("cat", "dog"), ({"f/0": 0.5, "f/1": 1.0, "f/2": 1.5}, {})),
        ({"a": torch.zeros(()), "b": torch.ones(2)}, (), ({"f_a": 0.0, "f_b/0": 1.0, "f_b/1": 1.0}, {})),
        (torch.tensor([]), (), ({}, {})),
        (
            torch.tensor([[3, 1], [0, 4]]),
            ("cat", "dog"),
            ({}, {"f": {"columns": ["class", "cat", "dog"], "rows": [["cat", 3, 1], ["dog", 0, 4]]}}),
        ),
        (torch.zeros(1, 2), (), ({}, {"f": {"columns": ["class", "0", "1"], "rows": [["0", 0.0, 0.0]]}})),
    ],
)
def test_results_of_a_metric(value: Any, classes: tuple[str, ...], expected: Any) -> None:
    named: Any = SimpleNamespace(config=SimpleNamespace(id2label=dict(enumerate(classes))))
    assert MetricResults(DATA, named)("f", value) == expected


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (torch.zeros(2, 2, 2), "a Tensor of shape [2, 2, 2]"),
        ((torch.zeros(3), torch.zeros(3)), "a tuple"),
        ("good", "a str"),
        ([[1], [1, 2]], "a list"),
        (torch.zeros(2, dtype=torch.complex64), "a Tensor of shape [2]"),
        ({"a": torch.zeros(1, 1, 1)}, "a Tensor of shape [1, 1, 1]"),
    ],
)
def test_a_metric_of_anything_else_is_refused_before_the_start(value: Any, shown: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        _trainer(tmp_path, metrics={"f": Gives(value)})
    assert f"metrics.f=Gives: computes {shown}. Let it give a number, a vector" in str(refused.value)
    assert not list(tmp_path.iterdir())


def test_and_at_the_first_evaluation_where_nobody_knew(gloo_world: World, tmp_path: Path) -> None:
    with pytest.raises(MisuseError, match=r"the metric eval_f computes a NoneType\. Let it give a number"):
        _trainer(tmp_path, metrics={"f": Gives(None)}).fit()


def test_best_and_early_stop_name_a_number_of_a_vector(tmp_path: Path) -> None:
    metrics = {"f1": Gives(torch.zeros(3)), "confusion": Gives(torch.zeros(3, 3))}
    _trainer(tmp_path, metrics=metrics, best="eval_f1/2", callbacks=[EarlyStopping(metric="eval_f1/0")])
    for name in ("eval_f1", "eval_f1/3", "eval_confusion"):
        with pytest.raises(ConfigError, match=r"is no result of the evaluation\. Use one of .*eval_f1/0, eval_f1/1"):
            _trainer(tmp_path, metrics=metrics, callbacks=[EarlyStopping(metric=name, mode="max")])
    names = MetricResults(DATA, nn.Linear(1, 1)).names
    assert names("f", Gives({})) == names("f", Gives(0.0)) == ["f", "f_*", "f/*"]  # nobody knows
    assert [known_mode(f"eval_{name}") for name in ("f1/loss", "mse/accuracy", "f1/0")] == ["max", "min", "max"]


def test_names_of_classes() -> None:
    named: Any = type("Named", (list,), {"classes": ["cat", "dog"]})(SAMPLES)
    features: Any = type("Featured", (list,), {"features": {"x": object(), "y": SimpleNamespace(names=["a", "b"])}})()
    bare, labels = nn.Linear(1, 1), {0: "no", 1: "yes"}
    model: Any = SimpleNamespace(config=SimpleNamespace(id2label=labels))
    default: Any = SimpleNamespace(config=SimpleNamespace(id2label={0: "LABEL_0"}))
    part: Any = torch.utils.data.Subset(named, [0])
    for data, of, expected in [
        (DataSpec(train=SAMPLES, eval_dataset={"one": part}), bare, ["cat", "dog"]),
        (DataSpec(train=features), default, ["a", "b"]),
        (DataSpec(train=named), model, ["no", "yes"]),
        (DATA, bare, []),
    ]:
        assert class_names(data, of) == expected


class Logs(Callback):
    def __init__(self, numbers: Mapping[str, Any], where: str) -> None:
        setattr(self, f"_{where}", numbers)

    def on_update(self, run: Run, outcome: Any) -> None:
        run.log(getattr(self, "_update", {}))

    def on_end(self, run: Run, results: Mapping[str, float]) -> None:
        run.log(getattr(self, "_end", {}))


class Returns(CrossEntropy):
    def __init__(self, logged: Any) -> None:
        super().__init__()
        self._logged = logged

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        return super().__call__(model, batch), self._logged


NUMBERS = {"a": 1, "b": np.float32(0.5), "c": torch.tensor(3), "d": torch.ones(1), "e": np.array(2.0), "f": True}


def test_any_number_is_logged_once_and_a_late_one_is_told(
    gloo_world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callbacks = [Logs(NUMBERS, "update"), Logs({"late": 1}, "end")]
    with caplog.at_level(logging.WARNING):
        _trainer(tmp_path, loss=Returns({"g": (torch.tensor(3.0), 4), "h": (1, 0)}), callbacks=callbacks).fit()
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        assert {name: record[name] for name in "abcdefg"} == dict(
            zip("abcdefg", (1, 0.5, 3, 1.0, 2.0, 1, 0.75), strict=True)
        )
        assert not {"h", "late"} & record.keys()
    assert "late is logged after the last record, and in none" in caplog.text


PAIR = ", and a sum with its count is wanted"
OURS = "which is a name of every record's own: use another, as own_"


@pytest.mark.parametrize(
    ("logged", "numbers", "said"),
    [
        ({}, {"a": "text"}, "run.log() is given 'a': 'text', which is no number"),
        ({}, {"a": torch.ones(2)}, "run.log() is given 'a': tensor([1., 1.]), which is no number"),
        (
            {},
            {"a": (1.0, 2)},
            "which is no number: sums with counts over all ranks are what a loss returns to be logged",
        ),
        ({}, {"loss": 1.0}, f"run.log() is given 'loss', {OURS}loss"),
        ({}, {"eval_mine": 1.0}, f"run.log() is given 'eval_mine', {OURS}"),
        ({}, {"loss_mine": 1.0}, f"run.log() is given 'loss_mine', {OURS}"),
        ({"g": (1, 1)}, {"g": 1.0}, "a callback and the loss both log g: give one of them another name"),
        ({"a": 0.5}, {}, f"the loss logs 'a': 0.5{PAIR}: return loss, {{'accuracy': ("),
        ({"a": (torch.ones(2), 2)}, {}, PAIR),
        ({"a": (1, 2, 3)}, {}, f"the loss logs 'a': (1, 2, 3){PAIR}"),
        ({1: (1, 2)}, {}, f"the loss logs 1: (1, 2){PAIR}"),
        ({"grad_norm": (1, 2)}, {}, f"the loss logs 'grad_norm', {OURS}"),
    ],
)
def test_no_other_is_logged(gloo_world: World, tmp_path: Path, logged: Any, numbers: Any, said: str) -> None:
    with pytest.raises(MisuseError) as refused:
        _trainer(tmp_path, loss=Returns(logged), callbacks=[Logs(numbers, "update")]).fit()
    assert said in str(refused.value)
