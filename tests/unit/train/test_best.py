"""The checkpoint of the best evaluation outlives newer ones; the objective of a run, which a sweeper is given."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distaccum import EMA, CheckpointError, CrossEntropy, DataSpec, EarlyStopping, MisuseError, Trainer
from distaccum.checkpoint.store import find
from distaccum.checkpoint.tensors import TensorFiles
from distaccum.config.direction import known_mode
from distaccum.config.schema import RunConfig
from distaccum.errors import ConfigError, NoObjectiveError
from distaccum.tools import export
from distaccum.tools.sweeps import check_direction, objective_of, require_finite
from distaccum.train.checks import check_results
from tests.support.runs import settings

DATA = [(torch.randn(4), torch.tensor(i % 3)) for i in range(16)]
SCORES = [5.0, 2.0, 3.0, float("nan"), 4.0, 1.5, 9.0]  # of the evaluations, one after each update


class Score:
    """The next one of a list."""

    def __init__(self, given: list[float]) -> None:
        self.given = list(given)

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        """Looks at nothing."""

    def compute(self) -> Tensor:
        return torch.tensor(self.given.pop(0))

    def reset(self) -> None:
        """Keeps its place."""


def _train(
    folder: Path, steps: int, scores: list[float], name: str = "score", callbacks: Any = (), **checkpoint: Any
) -> list[str]:
    trainer = {"max_steps": steps, "eval_every": 1, "log_every": 1}
    config = settings((4, 4), trainer, checkpoint={"every": 100, "keep": 1} | checkpoint, resume="auto")
    data = DataSpec(train=DATA, eval_dataset=DATA)
    torch.manual_seed(0)
    given: dict[str, Any] = {"metrics": {name: Score(scores)}, "callbacks": callbacks, "run_dir": folder}
    Trainer(nn.Linear(4, 3), CrossEntropy(), data, config=config, **given).fit()
    return sorted(path.name for path in (folder / "checkpoints").glob("step-*"))


def _best(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "checkpoints" / "best.json").read_text())
    return {name: value for name, value in found.items() if name != "before"}


def test_the_best_one_is_kept_beside_the_newest(gloo_world: Any, tmp_path: Path) -> None:
    assert _train(tmp_path, 5, SCORES, best="eval_score", mode="min") == ["step-2", "step-5"]
    assert _best(tmp_path) == {"checkpoint": "step-2", "metric": "eval_score", "mode": "min", "value": 2.0}
    assert _train(tmp_path, 7, SCORES[5:], best="eval_score", mode="min") == ["step-6", "step-7"]
    assert _best(tmp_path)["checkpoint"] == "step-6"


def _given(folder: Path | None, callbacks: Any = (), **config: Any) -> tuple[Trainer, nn.Module]:
    model, data = nn.Linear(4, 3), DataSpec(train=DATA, eval_dataset=DATA)
    settings = {"batch": {"global_size": 4, "micro_size": 4}, "metrics": {"wandb": {"mode": "disabled"}}} | config
    given: Any = {"config": RunConfig.from_dict(settings), "callbacks": callbacks, "run_dir": folder}
    return Trainer(model, CrossEntropy(), data, **given), model


def _are_of(model: nn.Module, path: Path, kind: str = "model") -> bool:
    saved = TensorFiles(path, kind)
    return all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())


def test_the_best_weights_are_taken_by_name(
    gloo_world: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, best = tmp_path / "run", tmp_path / "run" / "checkpoints" / "best"
    _train(run, 5, SCORES, best="eval_score", mode="min")
    assert best.read_text() == "step-2\n"
    said = capsys.readouterr().out.splitlines()
    assert said[-2:] == [f"best: step 2, eval_score 2.0000; {best}", f"report: {run / 'report.html'}"]
    trainer, model = _given(run)
    assert trainer.load_best() == best.with_name("step-2")
    assert _are_of(model, best.with_name("step-2"))
    for name, steps in {"init_from": 0, "resume": 2}.items():
        trainer, model = _given(tmp_path / name, **{name: str(best)}, trainer={"max_steps": steps})
        trainer.fit()
        assert _are_of(model, best.with_name("step-2"))
    for name, flags in {"step-5": [], "step-2": ["--best"]}.items():
        monkeypatch.setattr("sys.argv", ["export", str(run), str(tmp_path / f"{name}.safetensors"), *flags])
        export.main()
        model.load_state_dict(dict(TensorFiles(tmp_path / f"{name}.safetensors")))
        assert _are_of(model, best.with_name(name))
    monkeypatch.chdir(tmp_path)  # without a checkpoint of it the best value is named, too, and paths are relative
    capsys.readouterr()
    _train(tmp_path / "other", 5, SCORES)
    records = map(json.loads, (tmp_path / "other" / "metrics.jsonl").read_text().splitlines())
    loss, step = min((one["eval_loss"], one["step"]) for one in records)
    said = capsys.readouterr().out.splitlines()
    assert said[-2:] == [f"best: step {step}, eval_loss {loss:.4f}", "report: other/report.html"]


def test_where_there_is_no_best_one_error_says_so(gloo_world: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"load_best\(\) looks in the run directory: call fit\(\) before, or"):
        _given(None)[0].load_best()
    _train(tmp_path, 2, SCORES)
    with pytest.raises(CheckpointError, match=r"has no best checkpoint: a run keeps one with checkpoint\.best=eval_"):
        _given(tmp_path)[0].load_best()
    _train(tmp_path, 3, SCORES, best="eval_loss")
    (tmp_path / "checkpoints" / "step-3" / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"step-3: missing, added or changed: model\.safetensors"):
        _given(tmp_path)[0].load_best()


def test_the_best_average_is_what_was_evaluated(gloo_world: Any, tmp_path: Path) -> None:
    settings = {"trainer": {"max_steps": 3, "eval_every": 1}, "checkpoint": {"best": "eval_loss"}}
    trainer, model = _given(tmp_path, [EMA(decay=0.5, evaluate=True)], **settings)
    trainer.fit()
    assert _are_of(model, trainer.load_best(), "ema")
    export.export(find(tmp_path, best=True), tmp_path / "best.safetensors")
    assert _are_of(model, tmp_path / "best.safetensors")
    assert trainer.test(DATA)["test_loss"] == pytest.approx(_best(tmp_path)["value"], rel=1e-6)


@pytest.mark.parametrize(
    ("dataset", "function", "problem"),
    [
        ([], None, "list has no samples: give a dataset with len"),
        (iter(DATA), None, "is a stream, whose samples have no numbers"),
        (DataSpec(train=DATA), None, "a DataSpec has samples to train on: give the dataset itself"),
        (DATA, lambda model, batch: batch[0].sum(), r"a tensor of shape \[\] for 4 samples: say what to predict"),
        (DATA, lambda model, batch: "none", "a str in what the model gives: say what to predict"),
    ],
)
def test_what_cannot_be_predicted_is_said(gloo_world: Any, dataset: Any, function: Any, problem: str) -> None:
    trainer, _ = _given(None)
    for call in [lambda: trainer.predict(dataset, function)] + [lambda: trainer.test(dataset)] * (function is None):
        with pytest.raises(MisuseError, match=problem):
            call()


def test_a_resumed_run_knows_the_best_before(gloo_world: Any, tmp_path: Path) -> None:
    _train(tmp_path, 2, SCORES, best="eval_score", mode="min")
    assert _train(tmp_path, 5, [3.0, 2.5, 2.25], best="eval_score", mode="min") == ["step-2", "step-5"]
    assert _train(tmp_path, 6, [1.0], best="eval_score", best_mode="max") == ["step-6"]  # none of this mode before
    assert _best(tmp_path) == {"checkpoint": "step-6", "metric": "eval_score", "mode": "max", "value": 1.0}


@pytest.mark.parametrize(
    ("name", "stated", "best"),
    [("accuracy", {}, "step-2"), ("word_error_rate", {}, "step-1"), ("mine", {"best_mode": "max"}, "step-2")],
)
def test_the_best_is_the_largest_accuracy_and_the_smallest_error(
    gloo_world: Any, tmp_path: Path, name: str, stated: dict[str, Any], best: str
) -> None:
    _train(tmp_path, 3, [0.5, 0.9, 0.6], name, best=f"eval_{name}", **stated)
    assert _best(tmp_path)["checkpoint"] == best


def test_a_name_that_says_nothing_needs_a_mode(gloo_world: Any, tmp_path: Path) -> None:
    said = r"checkpoint\.mode: is not stated, and the name 'eval_score' does not say .*\. State checkpoint\.mode=min or"
    with pytest.raises(ConfigError, match=said):
        _train(tmp_path, 2, SCORES, best="eval_score")
    with pytest.raises(ConfigError, match=r"callbacks\.early_stop\.mode: is not stated, and the name 'eval_score'"):
        _train(tmp_path, 2, SCORES, callbacks=[EarlyStopping(metric="eval_score")])


def test_a_sweep_for_the_worst_is_refused() -> None:
    for direction, objective in {"minimize": "eval_loss", None: "eval_accuracy", "maximize": "tokens_per_s"}.items():
        check_direction(direction, objective)
    for wrong in (("Direction.minimize", "eval_accuracy"), (["minimize", "maximize"], ["eval_loss", "eval_loss"])):
        with pytest.raises(
            ConfigError, match=r"hydra\.sweeper\.direction=m\w+: and objective=eval_\w+ is better where"
        ):
            check_direction(*wrong)


def test_what_a_name_says() -> None:
    for mode, names in {
        "min": "loss eval_news_loss loss_first bits_per_byte cross_entropy mean_squared_error accuracy_loss wer",
        "max": "eval_top5_accuracy accuracy_top5 f1_macro f1-score r2 map50 rougeLsum valAccuracy bleu_score "
        "accuracy_per_class eval_mAP mIoU",
        None: "loss_scale lr score accuracy_std negative_log_likelihood false_positive_rate f r entropy accuracy_gap "
        "eval_map_cost 1-ssim time_to_accuracy recall_latency std_accuracy eval_delta_f1 non_accuracy",
    }.items():
        assert {name: known_mode(name) for name in names.split()} == dict.fromkeys(names.split(), mode)


def test_what_cannot_be_is_refused(gloo_world: Any, tmp_path: Path) -> None:
    said = (
        r"checkpoint\.best=eval_other: is no result of the evaluation\. Use one of eval_loss, .*accuracy, eval_score$"
    )
    with pytest.raises(ConfigError, match=said):
        _train(tmp_path, 2, SCORES, best="eval_other")
    with pytest.raises(ConfigError, match=r"checkpoint\.best=eval_loss: and checkpoint\.every=0 saves nothing"):
        _train(tmp_path, 2, SCORES, best="eval_loss", every=0)
    assert not (tmp_path / "metrics.jsonl").exists()  # before a window


class Plain:
    """A loss that scores nothing."""

    count, __call__ = CrossEntropy.count, CrossEntropy.__call__
    ignore_index, _chunk = -100, None


class More(CrossEntropy):
    """Scores by another name, which it does not state beforehand."""

    def scores(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        found = super().scores(model, batch)
        return found | {"wrong": len(batch[1]) - found["accuracy"]}


class Stated(More):
    """And states it."""

    score_names = ("loss", "accuracy", "wrong")


class Several(Plain):
    """Two losses by name."""

    def count(self, batch: tuple[Tensor, Tensor]) -> dict[str, int]:  # type: ignore[override]
        return {"first": len(batch[1]), "second": len(batch[1])}


@pytest.mark.parametrize(
    ("loss", "good", "bad"),
    [
        (CrossEntropy(), ["loss", "accuracy", "f1", "f1_macro"], ["accurracy", "wrong", "f", "bits_per_byte"]),
        (More(), ["loss", "wrong", "anything"], []),
        (Stated(), ["loss", "wrong"], ["right"]),
        (Plain(), ["loss", "f1"], ["accuracy"]),
        (Several(), ["first", "second"], []),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, list) else None,
)
@pytest.mark.parametrize("sets", ["", "near"])
def test_a_name_that_is_no_result_is_refused_as_far_as_it_is_known(
    loss: Any, good: list[str], bad: list[str], sets: str
) -> None:
    held_out = {sets: DATA, "far": DATA} if sets else DATA
    data, prefix = DataSpec(train=DATA, eval_dataset=held_out), f"eval_{sets}_" if sets else "eval_"

    def check(name: str) -> None:
        config = RunConfig.from_dict({"checkpoint": {"best": f"{prefix}{name}", "mode": "min"}})
        given: Any = SimpleNamespace(data=data, config=config, callbacks=[], loss=loss, metric_names=["f1", "f1_*"])
        check_results(given)

    for name in good:
        check(name)
    for name in bad:
        with pytest.raises(
            ConfigError, match=rf"checkpoint\.best={prefix}{name}: is no result of the evaluation\. Use one"
        ):
            check(name)


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
    given: Any = SimpleNamespace(data=data, config=config, callbacks=[], loss=CrossEntropy(), metric_names=[])
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
