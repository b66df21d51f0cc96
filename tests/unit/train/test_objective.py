"""The objective of a run: which number a sweeper is given, and what is refused before training."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distaccum.config.schema import RunConfig
from distaccum.data.spec import DataSpec
from distaccum.errors import ConfigError
from distaccum.losses.cross_entropy import CrossEntropy
from distaccum.train.checks import check_results
from distaccum.train.sweeps import NoObjectiveError, objective_of, require_finite

RECORDS = (
    {"step": 1, "loss": 2.5, "tokens_per_s": 100.0, "eval_loss": 2.25, "eval_accuracy": 0.5},
    {"step": 2, "loss": 2.0, "tokens_per_s": 90.0},
)


def _records(folder: Path) -> Path:
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in RECORDS))
    return folder / "metrics.jsonl"


@pytest.mark.parametrize(
    ("objective", "evaluation", "value"),
    [
        (None, {"eval_loss": 1.5}, 1.5),
        (None, {}, 2.25),
        ("loss", {"eval_loss": 1.5}, 2.0),
        ("eval_accuracy", {}, 0.5),
        (["eval_loss", "tokens_per_s"], {"eval_loss": 1.5}, [1.5, 90.0]),
    ],
)
def test_the_last_number_of_that_name_is_returned(
    tmp_path: Path, objective: Any, evaluation: dict[str, float], value: Any
) -> None:
    assert objective_of(objective, evaluation, _records(tmp_path)) == value


def test_without_an_evaluation_nothing_is_returned(tmp_path: Path) -> None:
    assert objective_of(None, {}, tmp_path / "metrics.jsonl") is None
    assert math.isnan(objective_of("eval_loss", {"eval_loss": math.nan}, _records(tmp_path)))  # type: ignore[arg-type]


def test_a_number_that_is_not_there_is_an_error_that_lists_those_that_are(tmp_path: Path) -> None:
    names = "there are eval_accuracy, eval_loss, loss, step, tokens_per_s"
    with pytest.raises(NoObjectiveError, match=f"objective=mfu: the run has ended without such a number; {names}"):
        objective_of("mfu", {}, _records(tmp_path))


def test_what_cannot_be_compared_is_no_objective() -> None:
    assert require_finite(2.0, "loss") == 2.0
    with pytest.raises(NoObjectiveError, match="objective=loss: the run has ended with nan"):
        require_finite([1.0, math.nan], ["eval_loss", "loss"])


HELD_OUT = DataSpec(train=[(0, 1)] * 4, eval_dataset=[(0, 1)] * 2, description="")
SETS = DataSpec(train=[(0, 1)] * 4, eval_dataset={"a": [(0, 1)], "b": [(0, 1)]}, description="")
NONE = DataSpec(train=[(0, 1)] * 4, description="")


def _check(data: DataSpec, objective: Any) -> None:
    config = RunConfig.from_dict({"objective": objective})
    given: Any = SimpleNamespace(data=data, config=config, callbacks=[], loss=CrossEntropy(), metrics={})
    check_results(given)


@pytest.mark.parametrize(
    ("objective", "data", "says"),
    [
        ("eval_acuracy", HELD_OUT, "objective=eval_acuracy: is no result of the evaluation. Use one of eval_loss, "),
        ("eval_loss", SETS, r"objective=eval_loss: is no result of one of the held-out sets a, b\. Use one of eval_a_"),
        ("eval_loss", NONE, "objective=eval_loss: the run has no evaluation"),
        ("los", NONE, "objective=los: no record and no evaluation has it; did you mean loss"),
        (["eval_loss", "speed"], HELD_OUT, "objective=speed: no record"),
    ],
)
def test_a_name_that_nothing_has_is_refused_before_training(objective: Any, data: DataSpec, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        _check(data, objective)


@pytest.mark.parametrize("objective", ["eval_loss", "eval_accuracy", "loss", "loss_main", ["loss", "samples_per_s"]])
def test_names_that_there_are_pass(objective: Any) -> None:
    _check(HELD_OUT, objective)


@pytest.mark.parametrize("objective", [[], 3, {"eval_loss": 1}, ["eval_loss", 2]])
def test_what_is_no_name_is_refused(objective: Any) -> None:
    with pytest.raises(ConfigError, match="objective"):
        RunConfig.from_dict({"objective": objective})
