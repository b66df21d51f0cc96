"""Trackers in one process: what each is told, writes and leaves out; none of their failures is the run's."""

import errno
import io
import json
import logging
import math
import os
import posixpath
import random
import re
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Thread
from time import sleep
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer.record_writer import RecordWriter
from torch import nn

from distaccum import DataSpec, Logger, RunConfig, RunInfo, Trainer
from distaccum.config.metrics import MetricsConfig, WandbConfig
from distaccum.distributed.world import World
from distaccum.errors import ConfigError
from distaccum.losses.cross_entropy import CrossEntropy
from distaccum.tools.mlflow import MLflowLogger, ToldOnce, flat
from distaccum.tools.record_file import last_window, rewind
from distaccum.tools.tensorboard import TensorBoardLogger
from distaccum.tools.wandb import best_of, resolved, run_id
from distaccum.tools.wandb_upload import main as upload
from distaccum.train.metrics.background import InThread, KeptCheckpoints
from distaccum.train.metrics.build import check_loggers
from distaccum.train.metrics.console import ConsoleLogger, Status, open_console
from distaccum.train.metrics.loggers import JsonlLogger, records_of
from distaccum.train.owner import Owner, OwnershipLostError
from tests.support.commands import ROOT
from tests.support.runs import settings
from tests.support.terminal import on_terminal


def _record(window: int, **more: Any) -> dict[str, Any]:
    return {"step": window - 1, "window": window, "loss": 1 / window, "applied": window > 1, **more}


def _info(folder: Path, window: int = 0, *, skipped: int = 0) -> RunInfo:
    config = {"optim": {"lr": 0.1, "optimizer": {"betas": [0.9, 0.95]}}, "init_from": None, "weird[key]": "x" * 9000}
    return RunInfo(
        folder=folder,
        id="run1",
        window=window,
        step=window - skipped,
        total_steps=8,
        config=config,
        plan={"unit": "samples"},
    )


def _write(folder: Path, records: list[dict[str, Any]]) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


# ------------------------------------------------------------------------------------- loggers of one's own


class Collects(Logger):
    """Everything that it is told."""

    def __init__(self, name: str = "") -> None:
        self.name, self.records, self.calls = name, [], []
        COLLECTED.append(self)

    def begin(self, run: RunInfo) -> None:
        self.run = run
        self.calls.append("begin")

    def log(self, record: Mapping[str, Any]) -> None:
        self.records.append(record)

    def checkpoint(self, path: Path, *, step: int, best: bool) -> None:
        assert (path / "manifest.json").is_file()
        self.calls.append(f"checkpoint {step}{' best' if best else ''}")

    def close(self, *, failed: bool) -> None:
        self.calls.append(f"close {failed}")


COLLECTED: list[Collects] = []


class Breaks(Logger):
    """Every record is too much for it."""

    def log(self, record: dict[str, Any]) -> None:  # type: ignore[override]
        record.clear()  # of a copy
        raise OSError("http://me:secret@host refuses")


class CannotBegin(Breaks):
    """Nothing is there to begin with."""

    def begin(self, run: RunInfo) -> None:
        raise RuntimeError("no server")


class Draws(Logger):
    """Shuffles, and has its requests wait for a random time, as clients of servers do; and fails in between."""

    def log(self, record: Mapping[str, Any]) -> None:
        random.random()  # noqa: S311
        torch.rand(2)
        raise OSError("refused")

    def checkpoint(self, path: Path, *, step: int, best: bool) -> None:
        np.random.rand()  # noqa: NPY002  the global generator


class Noisy(list[Any]):
    """Samples that are another each time, from the generators that a user's program draws from."""

    def __getitem__(self, index: Any) -> Any:
        x, y = super().__getitem__(index)
        return x + random.random() + np.random.rand() + torch.rand(4), y  # noqa: NPY002, S311


def _train(run_dir: Path, given: list[Logger], *, kind: type[list[Any]] = list, **metrics: Any) -> None:
    torch.manual_seed(0)
    x = torch.randn(40, 4)
    samples: Any = [(row, row[:3].argmax()) for row in x]
    trainer = {"max_steps": 4, "log_every": 1, "eval_every": 2}
    saves = {"every": 3, "best": "eval_loss", "background": False}
    config = settings((8, 3), trainer, checkpoint=saves, metrics=metrics, schedule={})
    data = DataSpec(train=kind(samples), eval_dataset=samples[:8], description="")
    Trainer(nn.Linear(4, 3), CrossEntropy(), data, config=config, loggers=given, run_dir=run_dir).fit()


def test_loggers_of_ones_own_have_every_record_and_end_no_run(
    gloo_world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    COLLECTED.clear()
    mine = Collects()
    nodes = {"named": {"_target_": f"{__name__}.Collects", "name": "of the configuration"}}
    _train(tmp_path, [mine, Breaks(), CannotBegin()], loggers=nodes)
    expected = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in expected] == [1, 2, 3, 4]
    assert [logger.records for logger in COLLECTED] == [expected, expected]
    assert COLLECTED[1].name == "of the configuration"
    best = json.loads((tmp_path / "checkpoints" / "best.json").read_text())
    assert (best["metric"], mine.calls) == (
        "eval_loss",
        ["begin", "checkpoint 2 best", "checkpoint 3", "checkpoint 4 best", "close False"],
    )
    assert (mine.run.folder, mine.run.window, mine.run.total_steps) == (tmp_path, 0, 4)
    assert mine.run.config["batch"]["global_size"] == 8
    assert mine.run.plan == json.loads((tmp_path / "plan.json").read_text())
    said = [record.getMessage() for record in caplog.records if record.getMessage().startswith("logger ")]
    goes_on = "and metrics.jsonl has every record"
    assert said == [
        f"logger CannotBegin: RuntimeError: no server (in begin); the run goes on without it, {goes_on}",
        f"logger Breaks: OSError: http://<redacted>@host refuses (in log); the run goes on, {goes_on}",
        "logger Breaks: 4 of its calls failed; metrics.jsonl has every record",
    ]


def test_a_logger_of_ones_own_that_draws_random_numbers_changes_no_weight(gloo_world: World, tmp_path: Path) -> None:
    for name, given in (("without", []), ("with", [Draws()])):
        _train(tmp_path / name, given, kind=Noisy)
    of = "checkpoints/step-4/model.safetensors"
    assert (tmp_path / "with" / of).read_bytes() == (tmp_path / "without" / of).read_bytes()


def test_the_logger_of_the_page_works(gloo_world: World, tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "trackers.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(block, names)  # noqa: S102  the page's own
    _train(tmp_path, [names["Csv"]()])
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    written = [line.split(",") for line in (tmp_path / "losses.csv").read_text().splitlines()]
    assert [(int(step), float(loss)) for step, loss in written] == [(one["step"], one["loss"]) for one in records]


@pytest.mark.parametrize(
    ("node", "problem"),
    [
        ({"_target_": "no.such.Thing"}, "cannot be imported"),
        ({"_target_": f"{__name__}.Collects", "nam": "x"}, "no such argument; did you mean name"),
        ({"_target_": "torch.nn.Linear", "in_features": 1, "out_features": 1}, "makes no Logger"),
    ],
)
def test_a_logger_that_cannot_be_built_is_refused(node: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=rf"metrics\.loggers\.mine.*{problem}"):
        check_loggers(MetricsConfig(wandb=WandbConfig(mode="offline"), loggers={"mine": node}))


def test_what_is_no_logger_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"loggers=list.*is no Logger"):
        Trainer(nn.Linear(1, 1), CrossEntropy(), [], loggers=[[]])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match=r"loggers=Breaks.*is no list"):
        Trainer(nn.Linear(1, 1), CrossEntropy(), [], loggers=Breaks())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"metrics\.loggers\.mine.*names no class"):
        RunConfig.from_dict({"metrics": {"loggers": {"mine": "print"}}})


# ------------------------------------------------------------------------------------------------- settings


def test_checkpoints_to_log_have_to_be_made() -> None:
    for tracker in ("wandb", "mlflow"):
        wanted = {"metrics": {tracker: {"log_checkpoints": "best"}}}
        with pytest.raises(ConfigError, match=r"log_checkpoints=best: and checkpoint\.best names no result"):
            RunConfig.from_dict(wanted)
        with pytest.raises(ConfigError, match=r"log_checkpoints=best: and checkpoint\.every=0 saves none"):
            RunConfig.from_dict({**wanted, "checkpoint": {"every": 0}})


def test_wandbs_variables_count_where_the_configuration_is_silent() -> None:
    silent, stated = WandbConfig(), WandbConfig(mode="disabled", project="mine")
    given = {"WANDB_MODE": "online", "WANDB_PROJECT": "theirs"}

    def decided(settings: WandbConfig, environment: dict[str, str]) -> tuple[str | None, ...]:
        found = resolved(settings, environment)
        return found.mode, found.project

    assert decided(silent, {}) == ("offline", "distaccum")
    assert decided(silent, given) == ("online", "theirs")
    assert decided(stated, given) == ("disabled", "mine")
    assert decided(silent, {"WANDB_MODE": "dryrun"})[0] == "offline"
    assert decided(silent, {"WANDB_MODE": ""})[0] == "offline"
    assert decided(silent, {"WANDB_SWEEP_ID": "s"})[0] == "online"  # its agent waits for the run
    assert decided(silent, {"WANDB_SWEEP_ID": "s", "WANDB_MODE": "offline"})[0] == "offline"
    with pytest.raises(ConfigError, match=r"WANDB_MODE=on: no such mode\. Use one of offline, online, disabled"):
        resolved(silent, {"WANDB_MODE": "on"})
    assert run_id({"WANDB_RUN_ID": "agents"}) == "agents"
    assert run_id({}) != run_id({})
    assert [best_of("eval_mine", "eval_mine", "max"), best_of("eval_f1"), best_of("lr")] == ["max", "max", None]


# ---------------------------------------------------------------------------------------------- TensorBoard


def _scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """By tag each step and value, read by TensorBoard itself."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0}).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_has_each_step_of_a_resumed_run_once(tmp_path: Path) -> None:
    records = [_record(window) for window in range(1, 5)]
    records[1] |= {"loss": math.nan, "eval_loss": 0.25, "eval_news_loss": 3, "note": "no number"}
    first = TensorBoardLogger()
    first.begin(_info(tmp_path))
    for record in [*records, _record(5, loss=99.0), _record(6, loss=99.0)]:
        first.log(record)  # and it dies: nothing is closed
    _write(tmp_path, [*records, _record(5, loss=99.0)])
    rewind(tmp_path / "metrics.jsonl", 4)
    second = TensorBoardLogger()
    second.begin(_info(tmp_path, 4))
    second.log(_record(5))
    second.close(failed=False)
    found = _scalars(tmp_path / "tensorboard")
    assert found.keys() == {f"train/{name}" for name in records[0]} | {"eval/loss", "eval/news_loss"}
    assert found["eval/loss"] == [(2, 0.25)]
    assert found["eval/news_loss"] == [(2, 3.0)]
    expected = [float(np.float32(record["loss"])) for record in [*records, _record(5)]]
    assert [step for step, _ in found["train/loss"]] == [1, 2, 3, 4, 5]
    assert np.array_equal([value for _, value in found["train/loss"]], expected, equal_nan=True)
    assert found["train/applied"] == [(1, 0.0), (2, 1.0), (3, 1.0), (4, 1.0), (5, 1.0)]
    texts = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"tensors": 0}).Reload()
    shown = texts.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert '"lr": 0.1' in shown


def test_tensorboard_that_is_turned_on_later_has_what_was_before(tmp_path: Path) -> None:
    _write(tmp_path, [_record(1), _record(2)])
    logger = TensorBoardLogger()
    logger.begin(_info(tmp_path, 2))
    logger.log(_record(3))
    logger.close(failed=False)
    assert [step for step, _ in _scalars(tmp_path / "tensorboard")["train/loss"]] == [1, 2, 3]


def test_what_ends_tensorboards_own_thread_is_raised_and_not_printed_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    told: list[object] = []
    before = told.append
    monkeypatch.setattr(threading, "excepthook", before)
    running = set(threading.enumerate())
    logger = TensorBoardLogger()
    logger.begin(_info(tmp_path))
    (writer,) = set(threading.enumerate()) - running
    monkeypatch.setattr(RecordWriter, "write", fail)

    def log_on() -> None:
        for window in range(1, 1000):
            logger.log(_record(window))
            sleep(0.01)

    with pytest.raises(OSError, match="No space left"):
        log_on()
    writer.join()
    assert not told
    other = Thread(target=fail)
    other.start()
    other.join()
    assert len(told) == 1
    with pytest.raises(OSError, match="No space left"):
        logger.close(failed=True)
    assert threading.excepthook is before


# --------------------------------------------------------------------------------------------------- MLflow


def test_settings_are_flat_and_cut_for_mlflow(tmp_path: Path) -> None:
    found = dict(flat(_info(tmp_path).config))
    assert found.pop("weird_key_") == "x" * 5000
    assert found == {"optim.lr": "0.1", "optim.optimizer.betas": "[0.9, 0.95]", "init_from": "null"}


def test_names_that_mlflow_takes_for_paths_are_taken(tmp_path: Path) -> None:
    """MLflow refuses ``hf://set`` with all that comes with it: a run's parameters, or a whole record."""
    weights = {"hf://set": 1, "/abs": 2, "end/": 3, "a/../b": 4, "./c": 5, "a/b": 6, "..": 7, "": 8}
    expected = ["hf:__set", "_abs", "end_", "a_.._b", "__c", "a/b", "_.", "_"]
    assert list(dict(flat(weights))) == expected
    assert [name for name in expected if name.startswith((".", "/")) or posixpath.normpath(name) != name] == []


TEXTS = [{"prompt": "a", "text": "b\x1bc"}]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # MLflow's own use of SQLAlchemy
def test_mlflow_has_each_step_of_a_resumed_run_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient  # noqa: PLC0415  seconds of imports

    monkeypatch.chdir(tmp_path)  # where MLflow keeps artifacts of a local database
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"

    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "speech")
    folder = tmp_path / "run"
    folder.mkdir()
    first = MLflowLogger()
    first.begin(_info(folder))
    sent = [_record(1), _record(3, loss=math.nan), _record(5, loss=99.0)]  # 2 and 4 it could not send
    for record in sent:
        first.log(record)  # and it dies
    expected = [_record(1), _record(2, loss=math.inf), _record(3, loss=math.nan), _record(4)]
    _write(folder, expected)
    second = MLflowLogger()
    second.begin(_info(folder, 4))
    second.log(_record(5))  # repeated: MLflow takes nothing back
    second.log(_record(6, eval_loss=0.5, eval_texts=TEXTS, **{"eval_en//de/": 0.25}))  # a name that MLflow has not
    checkpoint = folder / "step-6"
    checkpoint.mkdir()
    (checkpoint / "model.safetensors").write_bytes(b"weights")
    second.checkpoint(checkpoint, step=6, best=True)
    (checkpoint / "model.safetensors").unlink()  # rolled back, and saved anew
    (checkpoint / "model.safetensors").write_bytes(b"WEIGHTS")
    second.checkpoint(checkpoint, step=6, best=False)
    second.alert("title", "text")
    second.mark_preempted()
    second.close(failed=False)
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("speech")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "KILLED"
    assert run.info.run_name == "run"
    assert run.data.params["optim.lr"] == "0.1"
    assert run.data.params["plan.unit"] == "samples"
    wanted = {"distaccum.run_id": "run1", "distaccum.alert": "title: text"}
    assert wanted.items() <= run.data.tags.items()
    assert run.data.tags["best_checkpoint"] == "checkpoints/step-6"

    def history(name: str) -> list[tuple[int, float]]:
        return sorted((point.step, point.value) for point in client.get_metric_history(run.info.run_id, name))

    assert [step for step, _ in history("window")] == [1, 2, 3, 4, 5, 6]
    steps, values = zip(*history("loss"), strict=True)
    assert steps == (1, 2, 3, 4, 5, 6)
    largest = float(np.finfo(np.float64).max)  # a database has no infinity
    assert np.array_equal(values, [1.0, largest, math.nan, 0.25, 99.0, 1 / 6], equal_nan=True)
    assert history("applied") == [(1, 0.0), *((window, 1.0) for window in range(2, 7))]
    assert history("eval_loss") == [(6, 0.5)]
    assert history("eval_en__de_") == [(6, 0.25)]
    assert json.loads(Path(client.download_artifacts(run.info.run_id, "texts/window-6.json")).read_text()) == TEXTS
    kept = Path(client.download_artifacts(run.info.run_id, "checkpoints/step-6/model.safetensors"))
    assert kept.read_bytes() == b"WEIGHTS"


# ------------------------------------------------------------------------------------------------ checkpoints


def test_a_resumed_run_tells_of_no_checkpoint_that_it_is_to_make_again(tmp_path: Path) -> None:
    """Checkpoints are counted in updates, and the run has made more attempts than that."""
    kept = KeptCheckpoints(tmp_path / "kept")
    told: list[int] = []
    for step in (2, 6):
        (tmp_path / f"step-{step}").mkdir()
        (tmp_path / f"step-{step}" / "model").write_text("weights")
        kept.keep(tmp_path / f"step-{step}", step=step, best=False)

    class Told(Logger):
        def checkpoint(self, path: Path, *, step: int, best: bool) -> None:
            told.append(step)

    thread = InThread("told", Told(), timeout_s=60, opening_s=60, remedy="", kept=kept, log_checkpoints="all")
    thread.begin(_info(tmp_path, 8, skipped=4))
    thread.close(failed=False)
    assert told == [2]


def test_a_kept_checkpoint_outlives_the_runs_own(tmp_path: Path) -> None:
    kept = KeptCheckpoints(tmp_path / "kept")
    assert not list(kept.all(9))
    for step in (2, 10, 4):
        own = tmp_path / f"step-{step}"
        (own / "engine").mkdir(parents=True)
        (own / "engine" / "part").write_text(f"weights {step}")
        place = kept.keep(own, step=step, best=step == 4)
        assert (place / "engine" / "part").stat().st_nlink == 2  # and no copy
        (own / "engine" / "part").unlink()
    kept.keep(own, step=4, best=True)  # told of again; and of another past
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / "part").write_text("other weights")
    kept.keep(tmp_path / "again", step=2, best=False)
    assert [path.name for path in (tmp_path / "kept" / "step-2").iterdir()] == ["part"]
    assert [(path.name, step, best) for path, step, best in kept.all(9)] == [("step-2", 2, False), ("step-4", 4, True)]
    assert (tmp_path / "kept" / "step-4" / "engine" / "part").read_text() == "weights 4"


def test_each_job_of_a_sweep_is_told_that_its_server_does_not_answer(caplog: pytest.LogCaptureFixture) -> None:
    """Threads follow one another, and have one another's number."""
    retries = logging.getLogger("urllib3.connectionpool")
    before = list(retries.filters)

    def ask() -> None:
        retries.addFilter(ToldOnce())
        for _ in range(3):
            retries.warning("Retrying (%r) after connection broken", 1)

    try:
        for _ in range(8):
            thread = Thread(target=ask)
            thread.start()
            thread.join()
    finally:
        retries.filters[:] = before
    said = [record.getMessage() for record in caplog.records]
    assert said == ["logger mlflow: its server does not answer, and is asked again while the run goes on"] * 8


def test_an_upload_of_what_is_no_run_is_refused_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["distaccum wandb-upload", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        upload()
    assert ended.value.code == 1
    said = f"distaccum wandb-upload: {tmp_path}: no run, it has no metrics.jsonl. Name a run's folder\n"
    assert capsys.readouterr().err == said


WORLD = World(rank=0, size=1, device=torch.device("cpu"))
RECORD = {
    "step": 3,
    "loss": 0.1 + 0.2,
    "grad_norm": 1.0,
    "lr": 1e-3,
    "samples": 24,
    "tokens": 240,
    "tokens_per_s": 5.0,
    "eval_bits_per_byte": 2.25,
    "loss_scale": 1.0,
    "applied": True,
    "skipped": 0,
}


def test_numbers_are_written_unrounded_and_appended_before_the_next_update(tmp_path: Path) -> None:
    for written in (1, 2):
        logger = JsonlLogger(tmp_path / "metrics.jsonl")
        logger.log(RECORD)
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == [RECORD] * written
        logger.close(failed=False)


def test_a_resumed_run_takes_back_what_it_will_repeat_and_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"window": {window}}}\n' for window in range(1, 6)) + '{"window": 6, "lo')
    rewind(path, 3)
    assert path.read_text() == '{"window": 1}\n{"window": 2}\n{"window": 3}\n'
    assert (tmp_path / "metrics.superseded.jsonl").read_text() == '{"window": 4}\n{"window": 5}\n{"window": 6, "lo\n'
    rewind(path, 3)
    rewind(tmp_path / "none.jsonl", 3)
    assert len((tmp_path / "metrics.superseded.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize("damage", [b'{"window": 2, "x": "\xff"}', b'{"window": 2, "lo', b"\x00\x00", b"[2]", b""])
@pytest.mark.fault("a damaged byte (one that is no UTF-8 too) or a torn line in `metrics.jsonl`")
def test_a_damaged_line_is_set_aside_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: bytes, says: Callable[[str], None]
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"window": 1}\n' + damage + b'\n{"window": 3}\n')
    rewind(path, 3)
    assert path.read_text() == '{"window": 1}\n{"window": 3}\n'
    assert (tmp_path / "metrics.superseded.jsonl").read_bytes() == damage + b"\n"
    says(caplog.text)


def _edited(path: Path) -> None:
    """As an editor saves that has read the file before its last record: without the end of the last line, too."""
    path.with_suffix(".tmp").write_text('{"window": 1}\n{"window": 2}')
    path.with_suffix(".tmp").replace(path)


@pytest.mark.parametrize(
    ("happens", "lost", "words"),
    [
        (Path.unlink, 0, "was removed while the run writes to it: it is opened anew, and has 3 records again"),
        (_edited, 0, "was replaced by another file while the run writes to it: it is opened anew, and has 1 records"),
        (lambda path: os.truncate(path, 20), 2, "was cut from 42 bytes to 20: the records in them are lost"),
    ],
)
@pytest.mark.fault("`metrics.jsonl` is removed, replaced by an editor, or cut while the run writes it")
def test_records_outlive_what_somebody_does_to_their_file(  # noqa: PLR0917
    tmp_path: Path, caplog: pytest.LogCaptureFixture, says: Any, happens: Any, lost: int, words: str
) -> None:
    path = tmp_path / "metrics.jsonl"
    logger = JsonlLogger(path)
    for window in (1, 2, 3):
        logger.log({"window": window})
    happens(path)
    logger.log({"window": 4})
    logger.log({"window": 5})
    logger.close(failed=False)
    assert [record["window"] for record in records_of(path)] == [*range(1, 4 - lost), 4, 5]
    assert path.read_bytes().endswith(b'{"window": 4}\n{"window": 5}\n')
    says(caplog.text)
    assert caplog.text.count(words) == 1 == len(caplog.records)


def test_a_file_that_another_run_has_put_there_gets_nothing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with Owner(tmp_path):
        logger = JsonlLogger(path)
        logger.log({"window": 1})
        path.unlink()
        (tmp_path / "owner.json").unlink()
        with pytest.raises(OwnershipLostError, match="was removed, and another run has taken the folder over"):
            logger.log({"window": 2})
        assert path.read_bytes() == b""
        with pytest.raises(OwnershipLostError):
            logger.close(failed=True)


def test_of_a_long_file_the_end_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the place in a line at which the end begins, what is done is what is done to the whole."""
    lines = [f'{{"window": {window}}}\n'.encode() for window in range(1, 60)] + [b'{"window": 60, "lo']
    for tail in range(1, 64):
        monkeypatch.setattr("distaccum.tools.record_file.TAIL", tail)
        path = tmp_path / f"{tail}.jsonl"
        path.write_bytes(b"".join(lines))
        assert last_window(path) == 59
        for window in (57, 3):
            rewind(path, window)
            assert path.read_bytes() == b"".join(lines[:window])
            assert last_window(path) == window
        superseded = path.with_name(f"{tail}.superseded.jsonl").read_bytes()
        assert superseded == b"".join([*lines[57:], b"\n", *lines[3:57]])


def _console(console: Console) -> ConsoleLogger:
    return ConsoleLogger(10, console, Status(10, WORLD))


def test_plain_lines_where_there_is_no_terminal() -> None:
    out = io.StringIO()
    logger = _console(Console(file=out, force_terminal=False))
    logger.log(RECORD)
    logger.close(failed=False)
    assert out.getvalue().startswith("step      3/10  loss 0.3000  grad norm 1.000  lr 1.00e-03")
    assert out.getvalue().endswith("held-out:  bits per byte 2.2500\n")


@pytest.mark.parametrize(("counted", "unit"), [(240, "tokens"), (24, "samples"), (30.5, "samples")])
def test_a_record_is_in_tokens_where_the_loss_counts_them_and_in_samples_elsewhere(counted: float, unit: str) -> None:
    out = io.StringIO()
    rates = {"tokens_per_s": 5.0, "samples_per_s": 6.0}
    _console(Console(file=out, force_terminal=True, width=300)).log(RECORD | rates | {"tokens": counted})
    assert f"  \x1b[2m{rates[f'{unit}_per_s']:.0f} {unit}/s\x1b[0m\n" in out.getvalue()  # dim


@pytest.mark.parametrize("columns", [80, 120])
def test_lines_on_a_terminal_are_whole_at_its_width(columns: int) -> None:
    long = {f"eval_{name}": 1.0 for name in ("loss", "accuracy", "words_per_line", "recall_at_ten", "perplexity")}
    skipped = RECORD | {"applied": False, "skipped": 3, "loss_scale": 65536.0, "underflow_share": 0.5, "mfu": 0.4}
    words = {}
    for terminal in (True, False):
        out = io.StringIO()
        logger = _console(Console(file=out, force_terminal=terminal, width=columns, no_color=True))
        logger.log(RECORD | long)
        logger.log(skipped)
        logger.alert("the loss scale has collapsed", "it has fallen to its minimum " + "and [so] on " * 20)
        logger.close(failed=False)
        words[terminal] = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())
    assert all(len(line) <= columns for line in words[True].splitlines())
    assert "\nstep      3/10  held-out:  bits per byte 2.2500  loss 1.0000" in words[True]
    assert len(words[False].splitlines()) == 3
    again = words[True].replace("\nstep      3/10  held-out:", "  held-out:").split()
    assert again == words[False].split()  # every word in one piece, and none is lost


def test_a_checkpoint_is_told_on_a_terminal_alone() -> None:
    for terminal, expected in ((True, "step      4/10  saved: /a/b\n"), (False, "")):
        out = io.StringIO()
        _console(Console(file=out, force_terminal=terminal, width=80)).saved(4, Path("/a/b"))
        assert out.getvalue() == expected
    _console(Console(file=out, force_terminal=True)).saved(4, Path.cwd() / "runs" / "b")
    assert out.getvalue() == "step      4/10  saved: runs/b\n"


def test_a_path_is_in_one_piece_also_where_it_is_wider_than_the_terminal() -> None:
    out, path = io.StringIO(), "/" + "x" * 100
    _console(Console(file=out, force_terminal=True, width=80)).saved(4, Path(path))
    assert out.getvalue().splitlines() == ["step      4/10  saved:", f"  {path}"]


def test_where_there_is_no_terminal_there_are_no_control_characters(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("CI", raising=False)
    logger = _console(open_console())
    print("printed", end="\r")
    logger.enter("evaluating after step 3")
    logger.log(RECORD)
    logger.close(failed=False)
    said = capsys.readouterr().out
    assert said.startswith("printed\rstep      3/10  loss 0.3000")
    assert "\x1b" not in said


def test_on_a_terminal_the_live_line_follows_the_run_and_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("COLUMNS", raising=False)
    with on_terminal(80) as screen:
        logger = _console(open_console())
        logger.log(RECORD)
        logger.enter("saving step 3")
        rows = screen.rows
        assert rows[-1].startswith("step 0/10  saving step 3  loss 0.3000")
        assert rows[0].startswith("step      3/10  loss 0.3000")
        logger.close(failed=False)
        assert screen.rows == rows[:-1]


def test_a_line_says_what_became_of_the_loss_scale_and_tells_a_spike_from_a_gradient_that_is_not_finite() -> None:
    out = io.StringIO()
    logger = _console(Console(file=out, width=300))
    skipped = RECORD | {"loss_scale": 65536.0, "underflow_share": 0.0123, "skipped": 2, "applied": False}
    for changed in ({}, {"grad_norm": math.nan, "spikes": 1}, {"grad_norm": 40.0, "spikes": 1}):
        logger.log(skipped | changed)
    scaled, nan, spike = out.getvalue().splitlines()
    assert "loss scale 65536  underflow 1.23%  skipped 2  SKIPPED: the gradient is NaN or infinite" in scaled
    assert "SKIPPED: the gradient is NaN or infinite" in nan
    assert "SKIPPED: the gradient norm spikes" in spike
