"""All trackers at once, over the death of the whole run and its resume: each has what metrics.jsonl says, once."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed.test_wandb import DYING, _are, _config_of, _history, _protos, _summary, _upload, messages
from tests.support.commands import ROOT, metrics, run, succeed

TIMES = {"samples_per_s", "tokens_per_s", "step_time_s", "data_wait_s", "memory_bytes"}  # of a window that is repeated
REPEATED = 5  # was logged, and is in no checkpoint


def _numbers(records: list[dict[str, Any]], *, but: set[str] = frozenset()) -> dict[str, list[tuple[int, float]]]:  # type: ignore[assignment]
    """By name the windows and values of records; without the names in ``but`` of the window that was repeated."""
    found: dict[str, list[tuple[int, float]]] = {}
    for record in records:
        for name, value in record.items():
            if record["window"] != REPEATED or name not in but:
                found.setdefault(name, []).append((record["window"], float(value)))
    return found


@pytest.mark.fault("kill -9 after steps that no checkpoint has, with W&B")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # MLflow's own use of SQLAlchemy
def test_every_tracker_has_each_step_of_a_killed_and_resumed_run_once(tmp_path: Path) -> None:
    from mlflow import MlflowClient  # noqa: PLC0415  seconds of imports
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: PLC0415

    folder, uri = tmp_path / "run", f"sqlite:///{tmp_path / 'mlflow.db'}"
    client = MlflowClient(uri)
    experiment = client.create_experiment("distaccum", artifact_location=str(tmp_path / "artifacts"))
    arguments = [
        *DYING,
        "checkpoint.every=2",
        "checkpoint.background=false",
        "resume=auto",
        "metrics.tensorboard.enabled=true",
        "metrics.mlflow.enabled=true",
        "metrics.mlflow.log_checkpoints=all",
        "+metrics.loggers.mine._target_=tests.support.deaths.Notes",
        f"hydra.run.dir={folder}",
    ]
    begun = str(folder / "wandb" / "latest-run" / "*.wandb")
    extra = {"MLFLOW_TRACKING_URI": uri, "PYTHONPATH": str(ROOT)}
    killed = run(*arguments, HOW="kill", AT="6", AWAIT=begun, **extra, timeout=150)
    assert killed.returncode == -9
    assert [record["step"] for record in metrics(folder)] == [1, 2, 3, 4, 5]
    (first,) = folder.glob("wandb/offline-run-*")
    time.sleep(1.1)  # W&B names an offline folder by the second
    finished = succeed(*arguments, "trainer.max_steps=8", **extra)
    assert "logger" not in finished.stderr
    assert "Weights & Biases" not in finished.stderr, finished.stderr  # it has opened
    expected = metrics(folder)
    assert [record["step"] for record in expected] == [1, 2, 3, 4, 5, 6, 7, 8]
    superseded = (folder / "metrics.superseded.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in superseded] == [5]

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    shown = {f"eval/{name[5:]}" if name.startswith("eval_") else f"train/{name}": name for name in _numbers(expected)}
    assert set(events.Tags()["scalars"]) == set(shown)
    for tag, name in shown.items():
        values = [(window, float(np.float32(value))) for window, value in _numbers(expected)[name]]
        assert [(event.step, event.value) for event in events.Scalars(tag)] == values, tag

    (mlflow,) = client.search_runs([experiment])
    assert (mlflow.info.status, mlflow.info.run_name) == ("FINISHED", "run")
    assert mlflow.data.params["optim.lr"] == "0.003"
    for name, points in _numbers(expected, but=TIMES).items():
        history = client.get_metric_history(mlflow.info.run_id, name)
        kept = [point for point in history if point.step != REPEATED or name not in TIMES]
        assert sorted((point.step, point.value) for point in kept) == points, name
    saved = {
        path.name for path in client.list_artifacts(mlflow.info.run_id, "checkpoints") for path in [Path(path.path)]
    }
    assert {"step-6", "step-8"} <= saved
    own = (folder / "checkpoints" / "step-8" / "model.safetensors").read_bytes()
    assert (
        tmp_path / "artifacts" / mlflow.info.run_id / "artifacts/checkpoints/step-8/model.safetensors"
    ).read_bytes() == own
    assert not list((folder / "mlflow-checkpoints").glob("step-*"))

    (file,) = folder.glob("wandb/offline-run-*/*.wandb")  # what `wandb sync` finds
    rows, _, run_id = _history(file)
    assert first.name.endswith(run_id)
    assert [path.parent.name for path in folder.glob("wandb/superseded/*/*.wandb")] == [first.name]
    _are(rows, expected)
    _are(_upload(folder), expected)
    assert mlflow.data.tags["distaccum.run_id"] == run_id

    notes = [json.loads(line) for line in (folder / "notes").read_text().splitlines()]
    assert notes == [
        ["begin", 0],
        *([n] for n in range(1, 6)),
        ["begin", 4],
        *([n] for n in range(5, 9)),
        ["close", False],
    ]


@pytest.mark.slow
@pytest.mark.fault("MLflow's server refuses")
def test_a_server_of_mlflow_that_refuses_costs_seconds(tmp_path: Path, says: Callable[[str], None]) -> None:
    given = ["metrics=jsonl", "metrics.mlflow.enabled=true"]
    folder, began = tmp_path / "run", time.monotonic()
    nobody = {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9", "PYTHONPATH": str(ROOT)}
    finished = run(*DYING, *given, f"hydra.run.dir={folder}", **nobody, timeout=150)
    assert finished.returncode == 0, finished.stderr
    assert time.monotonic() - began < 60  # a bound on hanging (a request alone is tried for minutes), not a timing
    refused, left = finished.stderr.splitlines()
    assert refused == "distaccum: logger mlflow: its server does not answer, and is asked again while the run goes on"
    says(left)
    assert [record["step"] for record in metrics(folder)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_a_run_of_a_sweeps_agent_is_that_sweeps(tmp_path: Path) -> None:
    """As ``wandb agent`` starts it, but offline: its variables, its file of settings, its arguments."""
    settings = tmp_path / "config.yaml"
    settings.write_text("wandb_version: 1\noptim.lr:\n  value: 0.25\n")
    variables = {"WANDB_SWEEP_ID": "sweep1", "WANDB_RUN_ID": "agents1", "WANDB_SWEEP_PARAM_PATH": str(settings)}
    folder = tmp_path / "run"
    given = ["trainer.max_steps=2", "optim.lr=0.25", f"hydra.run.dir={folder}"]
    succeed(*DYING, *given, WANDB_MODE="offline", PYTHONPATH=str(ROOT), **variables)
    (file,) = folder.glob("wandb/offline-run-*-agents1/*.wandb")
    (record,) = (r.run for r in _protos(file) if r.WhichOneof("record_type") == "run")
    assert isinstance(record, messages.RunRecord)
    assert (record.sweep_id, record.run_id) == ("sweep1", "agents1")
    config = _config_of(record)
    assert config["optim.lr"] == config["optim"]["lr"] == 0.25
    assert _summary(file)["loss"]["last"] == metrics(folder)[-1]["loss"]
    saved = json.loads((folder / "checkpoints" / "step-2" / "state.json").read_text())
    assert saved["wandb_id"] == "agents1"
