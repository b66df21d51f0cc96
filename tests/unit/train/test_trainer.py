"""Level 3 in one process: callbacks, evaluation, early stop, resume."""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from distaccum import BatchConfig, DataSpec, DDPConfig, OptimConfig, PrecisionConfig, RunConfig, Trainer, Zero1Config
from distaccum.accumulation.step import Outcome
from distaccum.data.adapters import split_by_rank
from distaccum.distributed.environment import LaunchEnvironment
from distaccum.distributed.world import World
from distaccum.engines.context import EngineContext
from distaccum.engines.factory import create, prepare
from distaccum.errors import ConfigError, MisuseError
from distaccum.losses.cross_entropy import CrossEntropy
from distaccum.train.callbacks import Callback, EarlyStopping, ReduceLROnPlateau, Run, named, restore, states
from tests.support.commands import metrics
from tests.support.optional import Library
from tests.support.runs import At, settings

datasets, torchmetrics = Library("datasets"), Library("torchmetrics")
classification = Library("torchmetrics.classification")


def _samples(size: int, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 4, generator=generator)
    return [(row, row[:3].argmax()) for row in x]


SOURCE = DataSpec(train=_samples(40, 0), eval_dataset=_samples(23, 1), description="")


def _config(*, every: int = 4, **trainer: Any) -> RunConfig:
    trainer = {"max_steps": 12, "log_every": 1, "eval_every": 2, **trainer}
    return settings((8, 3), trainer, save=every, optim={"lr": 0.05})


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 3)


class Heard(Callback):
    def __init__(self) -> None:
        self.events: list[str] = []

    def on_update(self, run: Run, outcome: Outcome) -> None:
        assert outcome.applied
        self.events.append(f"update {run.progress.step}")

    def on_eval(self, run: Run, results: Mapping[str, float]) -> None:
        assert "eval_loss" in results
        self.events.append(f"eval {run.progress.step}")

    def on_checkpoint(self, run: Run, path: Path) -> None:
        assert (path / "manifest.json").is_file()
        self.events.append(path.name)

    def on_end(self, run: Run, results: Mapping[str, float]) -> None:
        self.events.append(f"end {run.progress.step}")


def test_callbacks_are_called_in_order(gloo_world: World, tmp_path: Path) -> None:
    heard = Heard()
    Trainer(_model(), CrossEntropy(), SOURCE, config=_config(max_steps=4), callbacks=[heard], run_dir=tmp_path).fit()
    updates = ["update 1", "update 2", "eval 2", "update 3", "update 4", "eval 4", "step-4", "end 4"]
    assert heard.events == updates


@pytest.mark.slow
def test_torchmetrics_see_what_counts(gloo_world: World, tmp_path: Path) -> None:
    metrics = {
        "f1": classification.MulticlassF1Score(num_classes=3, average="micro"),
        "by": torchmetrics.MetricCollection(
            {"accuracy": classification.MulticlassAccuracy(num_classes=3, average="micro")}
        ),
    }
    results = Trainer(_model(), CrossEntropy(), SOURCE, config=_config(), metrics=metrics, run_dir=tmp_path).fit()
    assert results["eval_f1"] == pytest.approx(results["eval_accuracy"])
    assert results["eval_by_accuracy"] == pytest.approx(results["eval_accuracy"])
    assert results["eval_accuracy"] > 0.5
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["eval_f1"] == results["eval_f1"]


class Bare:
    """Two losses, and nothing to feed a metric."""

    def count(self, batch: Any) -> dict[str, float]:
        return {"first": len(batch[1]), "second": 2.0 * len(batch[1])}

    def __call__(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        total = nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")
        return {"first": total, "second": total}


def test_several_losses_are_logged_and_evaluated_each_over_its_own_count(gloo_world: World, tmp_path: Path) -> None:
    results = Trainer(_model(), Bare(), SOURCE, config=_config(), run_dir=tmp_path).fit()
    assert results["eval_first"] == pytest.approx(2 * results["eval_second"])
    assert results["eval_loss"] == pytest.approx(results["eval_first"] + results["eval_second"])
    record = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert record["loss"] == pytest.approx(record["loss_first"] + record["loss_second"])
    assert record["loss_first"] == pytest.approx(2 * record["loss_second"])
    with pytest.raises(ConfigError, match=r"loss=Bare: has no predictions\(model, batch\)"):
        Trainer(
            _model(),
            Bare(),
            SOURCE,
            config=_config(),
            metrics={"f1": classification.MulticlassF1Score(num_classes=3)},
            run_dir=tmp_path / "other",
        ).fit()


def test_early_stop_ends_the_run_where_it_stands(gloo_world: World, tmp_path: Path) -> None:
    stop = EarlyStopping(metric="eval_accuracy", patience=2, min_delta=0.5)
    Trainer(_model(), CrossEntropy(), SOURCE, config=_config(max_steps=100), callbacks=[stop], run_dir=tmp_path).fit()
    status = json.loads((tmp_path / "status.json").read_text())
    assert status["state"] == "done"
    assert status["step"] in (6, 8)  # at an evaluation
    assert status["reason"] == "eval_accuracy has not improved in 2 evaluations"
    assert (tmp_path / "checkpoints" / f"step-{status['step']}").is_dir()


def test_a_second_run_of_the_same_objects_begins_as_the_first_did(gloo_world: World, tmp_path: Path) -> None:
    """A notebook's cell that is run again: the optimizer's rate, and what callbacks have seen."""
    optimizer = torch.optim.SGD((model := _model()).parameters(), lr=0.5)
    stop, plateau = EarlyStopping(patience=3, min_delta=9.0), ReduceLROnPlateau(patience=0, threshold=0.9)
    config = replace(
        _config(max_steps=20), schedule={"_target_": "distaccum.train.schedules.Cosine", "warmup_steps": 0}
    )
    given: dict[str, Any] = {"optimizer": optimizer, "config": config, "callbacks": [stop, plateau]}
    seen = []
    for folder in ("first", "second"):
        Trainer(model, CrossEntropy(), SOURCE, **given, run_dir=tmp_path / folder).fit()
        records = [json.loads(line) for line in (tmp_path / folder / "metrics.jsonl").read_text().splitlines()]
        seen.append((records[-1]["step"], [record["lr"] for record in records if "lr" in record]))
    assert seen[0] == seen[1]
    assert seen[0][1][0] == 0.5 > seen[0][1][-1]


@pytest.mark.parametrize(
    ("schedule", "last"),
    [({}, 0.5), ({"warmup_steps": 40}, 0.5 * 6 / 41), ({"_target_": "distaccum.train.schedules.Linear"}, 0.5 / 6)],
)
def test_an_optimizer_of_ones_own_keeps_its_rate_unless_a_schedule_is_stated(
    schedule: dict[str, Any], last: float, gloo_world: World, tmp_path: Path
) -> None:
    optimizer = torch.optim.SGD((model := _model()).parameters(), lr=0.5)
    config = replace(_config(max_steps=6, log_every=1), schedule=schedule)
    Trainer(model, CrossEntropy(), SOURCE, optimizer=optimizer, config=config, run_dir=tmp_path).fit()
    assert [one["lr"] for one in metrics(tmp_path) if "lr" in one][-1] == pytest.approx(last)
    checkpoint = max((tmp_path / "checkpoints").glob("step-*"))
    assert "_target_" in json.loads((checkpoint / "state.json").read_text())["config"]["schedule"]


class Phased(Callback):
    mode = "warm"  # of its own: no direction

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.mode = state["mode"]


def test_state_goes_to_the_callback_of_its_metric_and_mode() -> None:
    loss, accuracy, other = (EarlyStopping(metric=f"eval_{name}") for name in ("loss", "accuracy", "f1"))
    accuracy.on_eval(None, {"eval_accuracy": 0.5})  # type: ignore[arg-type]
    saved = states([accuracy, other])
    again = EarlyStopping(metric="eval_accuracy"), EarlyStopping(metric="eval_accuracy", mode="min")
    restore([loss, *again], saved)
    assert again[0].state_dict() == accuracy.state_dict() != again[1].state_dict()
    assert loss.state_dict() == EarlyStopping().state_dict()
    restore([phased := Phased()], {"Phased-0": {"mode": "cold"}})
    assert phased.mode == "cold"


def test_a_callback_that_stops_between_evaluations_ends_before_the_next_window(
    gloo_world: World, tmp_path: Path
) -> None:
    stops = At(5, lambda run: run.stop("five are enough"))
    Trainer(_model(), CrossEntropy(), SOURCE, config=_config(), callbacks=[stops], run_dir=tmp_path).fit()
    assert json.loads((tmp_path / "status.json").read_text())["step"] == 5


def test_a_resumed_run_goes_on_bitwise_callbacks_included(gloo_world: World, tmp_path: Path) -> None:
    models, waited = [], []
    for folder, steps in (("whole", [12]), ("parts", [8, 12])):
        for limit in steps:
            model, stop = _model(), EarlyStopping(patience=100, min_delta=10.0)
            config = _config(max_steps=limit)
            Trainer(
                model, CrossEntropy(), SOURCE, resume="auto", config=config, callbacks=[stop], run_dir=tmp_path / folder
            ).fit()
        models.append(model)
        waited.append(stop.state_dict())
    assert waited[0] == waited[1]
    assert waited[0]["waited"] == 5
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


def _settings(**keywords: Any) -> RunConfig:
    return Trainer(_model(), CrossEntropy(), SOURCE, **keywords)._components.config


def test_keywords_replace_settings_of_the_configuration_and_no_others() -> None:
    config = _config()
    assert _settings(config=config) == config
    assert _settings() == RunConfig().with_schedule(own_optimizer=False)
    stated = _settings(
        global_batch_size=12,
        micro_batch_size=2,
        max_steps=7,
        engine="zero1",
        precision="bf16-mixed",
        clip_norm=0.5,
        seed=3,
        config=config,
    )
    assert stated == replace(
        config,
        batch=replace(config.batch, global_size=12, micro_size=2),
        trainer=replace(config.trainer, max_steps=7),
        engine=Zero1Config(),
        precision=PrecisionConfig(name="bf16"),
        optim=replace(config.optim, clip_norm=0.5),
        seed=3,
    )
    engine, precision = DDPConfig(bucket_cap_mb=1.0), PrecisionConfig(name="bf16", reduce_dtype="bf16")
    assert _settings(engine=engine, precision=precision).engine == engine
    assert _settings(engine=engine, precision=precision).precision == precision


@pytest.mark.parametrize(
    ("keywords", "limits"),
    [
        ({"max_epochs": 2}, (None, 2)),  # whatever max_steps is by default
        ({"max_steps": 9}, (9, None)),
        ({"max_steps": 9, "max_epochs": 2}, (9, 2)),
        ({}, (None, 5)),
    ],
)
def test_how_long_is_stated_in_one_place(keywords: dict[str, int], limits: tuple[int | None, int | None]) -> None:
    trainer = _settings(config=_config(max_steps=None, max_epochs=5), **keywords).trainer
    assert (trainer.max_steps, trainer.max_epochs) == limits


@pytest.mark.parametrize(("stated", "steps"), [({"max_epochs": 999}, 4995), ({"max_steps": 7}, 7), ({}, 300)])
def test_the_limit_that_is_stated_is_the_limit(tmp_path: Path, stated: dict[str, int], steps: int) -> None:
    config = RunConfig.from_dict({"batch": {"global_size": 8, "micro_size": 3}, "trainer": stated})
    assert Trainer(_model(), CrossEntropy(), SOURCE, config=config, run_dir=tmp_path)._components.total_steps == steps


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"global_batch_size": 0}, r"batch\.global_size=0: must be at least 1\. State a positive number"),
        ({"micro_batch_size": 64}, r"batch\.micro_size=64: "),
        ({"max_steps": -1}, r"trainer\.max_steps=-1: must be at least 0"),
        ({"max_steps": "7"}, r"trainer\.max_steps=7: not of type int or None"),
        ({"engine": "horovod"}, r"engine=horovod: no such choice\. Use one of ddp"),
        ({"engine": 3}, r"engine=3: neither a name nor settings"),
        ({"precision": 16}, "precision=16: neither a name nor settings but int"),
        ({"precision": "fp4"}, r"precision=fp4: no such choice\. Use one of fp32"),
        ({"clip_norm": 0.0}, r"optim\.clip_norm=0\.0: must be a positive finite number"),
        ({"seed": -1}, r"seed=-1: out of range"),
        ({"seed": "1"}, "seed=1: not of type int"),
        ({"seed": 1.5}, r"seed=1\.5: not of type int"),
        ({"resume": "nowhere"}, r"resume=nowhere: no such checkpoint folder"),
        ({"resume": True}, "resume=True: not of type str"),
        ({"config": {"seed": 1}}, r"config=dict: not a RunConfig\. Give .*RunConfig\.from_dict"),
        (
            {"clip_norm": 1.0, "config": RunConfig(optim=OptimConfig(clip_norm=None, clip_value=0.1))},
            r"optim\.clip_value=0\.1: and optim\.clip_norm=1\.0 too\. Set one of them",
        ),
        (
            {"global_batch_size": 8, "config": RunConfig(batch=BatchConfig(global_size=None, tokens=64))},
            r"batch\.tokens=64: and batch\.global_size=8 is given too\. State one",
        ),
    ],
)
def test_bad_keywords_are_refused_before_there_is_a_process_group(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Trainer(_model(), CrossEntropy(), SOURCE, **keywords)
    assert not torch.distributed.is_initialized()


def test_a_checkpoint_keeps_the_configuration_that_trains(gloo_world: World, tmp_path: Path) -> None:
    model = _model()
    groups = [{"params": [model.weight], "lr": 0.2}, {"params": [model.bias]}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    config = _config()
    Trainer(
        model,
        CrossEntropy(),
        SOURCE,
        max_steps=4,
        optimizer=optimizer,
        callbacks=[Heard()],
        run_dir=tmp_path,
        config=config,
    ).fit()
    kept = json.loads((tmp_path / "checkpoints" / "step-4" / "state.json").read_text())["config"]
    recorded = kept["optim"].pop("optimizer")
    assert recorded["_target_"] == "torch.optim.sgd.SGD"
    settings = [{name: group[name] for name in ("params", "lr", "momentum")} for group in recorded["param_groups"]]
    assert settings == [{"params": 12, "lr": 0.2, "momentum": 0.9}, {"params": 3, "lr": 0.1, "momentum": 0.9}]
    assert kept["optim"] == {"clip_norm": 1.0, "clip_value": None}  # no rate of an optimizer that was not made
    assert kept["model"] == {"_target_": "torch.nn.modules.linear.Linear"}
    assert kept["loss"] == {"_target_": "distaccum.losses.cross_entropy.CrossEntropy"}
    assert kept["data"] == {"_target_": "distaccum.data.spec.DataSpec", "description": "list"}
    assert list(kept["callbacks"]) == ["Heard-0"]
    assert kept["trainer"]["max_steps"] == 4
    assert kept["batch"] == asdict(config.batch)


def test_without_an_optimizer_a_checkpoint_keeps_that_of_the_configuration(gloo_world: World, tmp_path: Path) -> None:
    Trainer(_model(), CrossEntropy(), SOURCE, max_steps=4, run_dir=tmp_path, config=_config()).fit()
    kept = json.loads((tmp_path / "checkpoints" / "step-4" / "state.json").read_text())["config"]
    assert kept["optim"] == asdict(_config().optim)


def test_a_stream_needs_an_end() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.max_steps=null: the data is a stream"):
        Trainer(_model(), CrossEntropy(), iter([]), max_epochs=1)


def test_metrics_need_a_sample_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "30", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(ConfigError, match="holds out 23 samples for 30 ranks: a metric needs one on every rank"):
        Trainer(
            _model(),
            CrossEntropy(),
            SOURCE,
            config=_config(),
            metrics={"f1": classification.MulticlassF1Score(num_classes=3)},
        )


def test_a_loader_over_a_dataset_is_planned_like_the_dataset(
    gloo_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights, config = [], _config()
    config = replace(config, metrics=replace(config.metrics, console=True))
    for name, data in (("dataset", SOURCE.train), ("loader", DataLoader(SOURCE.train, batch_size=3, shuffle=True))):  # type: ignore[arg-type]
        model = _model()
        Trainer(model, CrossEntropy(), data, config=config, run_dir=tmp_path / name).fit()
        weights.append(list(model.parameters()))
        records = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        assert [record["samples"] for record in records] == [8 * (n + 1) for n in range(12)]
        assert not any("eval_loss" in record for record in records)  # nothing is held out
        assert re.search(r"^data +list, 40 samples$", capsys.readouterr().out, re.MULTILINE)
    assert all(map(torch.equal, *weights))


def test_the_last_update_is_logged_also_where_a_checkpoint_came_first(gloo_world: World, tmp_path: Path) -> None:
    config = _config(max_steps=5, eval_every=0, log_every=10, every=5)
    Trainer(_model(), CrossEntropy(), SOURCE, config=config, run_dir=tmp_path).fit()
    (record,) = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert record["step"] == 5


class Modes(Callback):
    """Which modules train in a window."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.seen = model, set[tuple[bool, ...]]()

    def on_update(self, run: Run, outcome: Outcome) -> None:
        self.seen.add(tuple(module.training for module in self.model.modules()))


def test_what_is_frozen_stays_frozen(gloo_world: World, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3).eval())
    mean = model[1].running_mean.clone()  # type: ignore[union-attr,operator]
    Trainer(model, CrossEntropy(), SOURCE, config=_config(), run_dir=tmp_path).fit()
    assert not any(module.training for module in model.modules())
    modes = Modes(model)
    again = Trainer(model, CrossEntropy(), SOURCE, config=_config(), callbacks=[modes], run_dir=tmp_path / "again")
    again.fit()
    assert modes.seen == {(True, True, False)}
    assert torch.equal(model[1].running_mean, mean)  # type: ignore[arg-type]
    pretrained = nn.Sequential(nn.Linear(4, 3), nn.Dropout()).eval()
    one: Any = {"config": _config(), "callbacks": [modes := Modes(pretrained)], "run_dir": tmp_path / "pretrained"}
    Trainer(pretrained, CrossEntropy(), SOURCE, **one).fit()
    assert modes.seen == {(True, True, True)}  # as a whole it came for evaluation


class ScoresOnly(Bare):
    def scores(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"loss": torch.zeros(()), "accuracy": torch.ones(())}


def test_scores_that_nothing_counts_are_refused(gloo_world: World, tmp_path: Path) -> None:
    with pytest.raises(
        MisuseError, match=r"scores\(\) gives \['accuracy', 'loss'\], and count\(\) \['first', 'second'\]"
    ):
        Trainer(_model(), ScoresOnly(), SOURCE, config=_config(), run_dir=tmp_path).fit()


def test_callbacks_are_resumed_by_name(gloo_world: World, tmp_path: Path) -> None:
    again: Any = {"resume": "auto", "config": _config(), "run_dir": tmp_path}
    Trainer(_model(), CrossEntropy(), SOURCE, max_steps=4, callbacks=[Heard()], **again).fit()
    stop, other = EarlyStopping(patience=50), EarlyStopping(patience=50, min_delta=9.0)
    Trainer(_model(), CrossEntropy(), SOURCE, max_steps=8, callbacks=[stop, other, Heard()], **again).fit()
    assert other.state_dict()["waited"] == 1  # of the two evaluations, the first was the best so far
    swapped = [EarlyStopping(patience=50), Heard(), EarlyStopping(patience=50, min_delta=9.0)]
    Trainer(_model(), CrossEntropy(), SOURCE, max_steps=8, callbacks=swapped, **again).fit()
    assert swapped[0].state_dict()["best"] == stop.state_dict()["best"]


def test_early_stopping_has_one_key_in_all_checkpoints() -> None:
    class Patient(EarlyStopping):
        pass

    names = [*named([EarlyStopping(), Patient(), EarlyStopping()])]
    assert names == ["EarlyStop-0", "Patient-0", "EarlyStop-1"]  # its name when format 3 began


def test_streams_that_would_be_used_wrongly_are_refused() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter([])

    with pytest.raises(ConfigError, match=r"trainer\.num_workers=2: the data is a stream"):
        Trainer(_model(), CrossEntropy(), Stream(), config=_config(num_workers=2))
    loader = DataLoader(Stream(), batch_size=2)
    with pytest.raises(ConfigError, match="micro_size=3: the loader's batch_size is 2"):
        Trainer(_model(), CrossEntropy(), loader, config=_config())
    with pytest.raises(ConfigError, match=r"batch\.global_size=8: no multiple of batch\.micro_size=3, .* Use 6"):
        Trainer(_model(), CrossEntropy(), DataLoader(Stream(), batch_size=3), config=_config())
    with pytest.raises(ConfigError, match="run_dir: is not given, and resume=auto"):
        Trainer(_model(), CrossEntropy(), SOURCE, resume="auto")
    theirs = datasets.Dataset.from_list([{"x": 1}]).to_iterable_dataset()
    with pytest.raises(ConfigError, match=r"not split over the 2 ranks.*split_dataset_by_node"):
        split_by_rank(DataLoader(theirs, batch_size=1), 0, 2)  # type: ignore[arg-type]


def test_a_group_that_the_program_opened_has_the_plans_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("is_initialized", True), ("get_rank", 1), ("get_world_size", 2)):
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    assert LaunchEnvironment.current() == LaunchEnvironment(rank=1, size=2)
    assert not Trainer(_model(), CrossEntropy(), SOURCE, config=_config()).is_main


def test_a_group_of_another_size_than_was_planned_is_refused(gloo_world: World) -> None:
    model = _model()
    formats = PrecisionConfig()
    context = EngineContext(engine=DDPConfig(), precision=formats, world_size=2, device=gloo_world.device)
    context = prepare(model, context)
    with pytest.raises(ConfigError, match="world size=1: the model was prepared for 2"):
        create(context, model, torch.optim.SGD(model.parameters(), lr=0.1), gloo_world)


def test_a_checkpoint_to_resume_may_be_a_path(gloo_world: World, tmp_path: Path) -> None:
    arguments = (_model(), CrossEntropy(), SOURCE)
    Trainer(*arguments, config=_config(), max_steps=2, run_dir=tmp_path / "one").fit()
    first = tmp_path / "one" / "checkpoints" / "step-2"
    Trainer(*arguments, config=_config(), max_steps=4, resume=first, run_dir=tmp_path / "two").fit()
    state = json.loads((tmp_path / "two" / "checkpoints" / "step-4" / "state.json").read_text())
    assert state["config"]["resume"] == str(first)


@pytest.mark.usefixtures("gloo_world")
def test_no_records_are_called_lost_that_the_run_never_made(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fit(folder: str, log_every: int, last: int, **keywords: Any) -> None:
        config = _config(log_every=log_every, eval_every=0, max_steps=100)
        callbacks = [At(last, lambda run: run.preempt("as a signal does"))]
        keywords |= {"run_dir": tmp_path / folder, "config": config, "callbacks": callbacks}
        Trainer(_model(), CrossEntropy(), SOURCE, **keywords).fit()

    fit("first", 10, 12)
    fit("other", 10, 14, resume=tmp_path / "first" / "checkpoints" / "step-12")
    fit("other", 10, 18, resume="auto")  # whose records begin at step 20
    fit("first", 4, 15, resume="auto")  # step 12 was no multiple of 10
    fit("first", 12, 25, resume="auto")
    assert "are lost" not in caplog.text
    (tmp_path / "first" / "metrics.jsonl").write_text("")
    fit("first", 12, 26, resume="auto")
    assert "the records after step 0 are lost, up to step 24 (window 24)" in caplog.text


@pytest.mark.usefixtures("gloo_world")
def test_two_runs_that_begin_at_once_have_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        Trainer(_model(), CrossEntropy(), SOURCE, config=_config(max_steps=1, eval_every=0)).fit()
    assert len(list((tmp_path / "runs").iterdir())) == 2
