"""MLflow: a run is found again by a tag, so that a resumed run continues it with each step once."""

from __future__ import annotations

import json
import logging
import os
import posixpath
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from threading import current_thread
from typing import TYPE_CHECKING, Any

from distaccum.config.metrics import MLflowConfig
from distaccum.train.metrics.background import UPLOAD_TIMEOUT_S, InThread, KeptCheckpoints, Tolerant, files_of
from distaccum.train.metrics.loggers import TEXTS, Logger, Record, RunInfo, records_of

if TYPE_CHECKING:
    from mlflow import MlflowClient

_log = logging.getLogger(__name__)

_TIMEOUT_S = 60.0  # a first run makes a database, which takes a while
_SERVER_TIMEOUT_S = 10.0  # of one that has not answered yet
_ID = "distaccum.run_id"
_KEY, _VALUE = 250, 5000  # characters that MLflow takes of a name and a value
_PARAMS = 100  # of one request
_RETRIES = logging.getLogger("urllib3.connectionpool")
_NOT_IN_KEYS = re.compile(r"[^\w\-. :/]")


def logger(settings: MLflowConfig, folder: Path) -> Logger:
    """What sends a run's records to MLflow, in a thread of its own.

    Args:
        settings: which checkpoints it is given.
        folder: of the run.
    """
    is_server = os.environ.get("MLFLOW_TRACKING_URI", "").startswith(("http://", "https://"))
    return InThread(
        "logger mlflow",
        Tolerant("mlflow", MLflowLogger),
        opening_s=_SERVER_TIMEOUT_S if is_server else _TIMEOUT_S,
        timeout_s=_TIMEOUT_S if settings.log_checkpoints == "none" else UPLOAD_TIMEOUT_S,
        remedy="metrics.jsonl has every record, and resume=auto sends what MLflow lacks",
        kept=KeptCheckpoints(folder / "mlflow-checkpoints"),
        log_checkpoints=settings.log_checkpoints,
    )


class MLflowLogger(Logger):
    """Sends records to an MLflow run, and ends it as the training ended.

    A process that resumes a run sends what the run has not got of the records before, and none that it has: MLflow
    removes nothing, so windows that are repeated stay as they were first sent.

    MLflow's environment variables say where it is; without an experiment's name there it is ``distaccum``.
    """

    def __init__(self) -> None:
        self._preempted, self._run = False, ""
        self._has: set[int] = set()  # windows
        self._uploaded: dict[int, list[int]] = {}  # by the checkpoint's step

    def begin(self, run: RunInfo) -> None:
        """Opens the run, or creates it, and sends what it lacks."""
        from mlflow import MlflowClient  # noqa: PLC0415  seconds of imports

        logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)  # it tells of every table it makes
        self._told = ToldOnce()
        _RETRIES.addFilter(self._told)
        self._client: MlflowClient = MlflowClient()
        self._run = self._find(run) or self._create(run)
        self._client.update_run(self._run, status="RUNNING")
        self._log_params(run)
        self._has = {point.step for point in self._client.get_metric_history(self._run, "window")}
        for record in records_of(run.folder / "metrics.jsonl"):
            if record["window"] <= run.window:
                self.log(record)

    def log(self, record: Record) -> None:
        """Sends a record that the run has not got: its texts as an artifact, then its numbers as one request."""
        from mlflow.entities import Metric  # noqa: PLC0415

        window, now = int(record["window"]), int(1000 * time.time())
        if window in self._has:
            return
        for name, value in record.items():
            if name == TEXTS or isinstance(value, Mapping):
                folder = "texts" if name == TEXTS else _key(f"tables/{name}")
                self._client.log_dict(self._run, value, f"{folder}/window-{window}.json")
        numbers = {_key(name): value for name, value in record.items() if isinstance(value, int | float)}
        numbers["window"] = numbers.pop("window")  # the last to arrive: who finds it finds the others
        metrics = [Metric(name, float(value), now, window) for name, value in numbers.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def alert(self, title: str, text: str) -> None:
        """Makes it a tag of the run."""
        self._client.set_tag(self._run, "distaccum.alert", f"{title}: {text}"[:_VALUE])

    def checkpoint(self, path: Path, *, step: int, best: bool) -> None:
        """Sends the files to ``checkpoints/step-N`` of the run's artifacts; the tag ``best_checkpoint`` names one.

        A step may come twice: with the same files, as the best; or with others, of a run that was rolled back.
        """
        place, files = f"checkpoints/step-{step}", [file.stat().st_mtime_ns for file, _ in files_of(path)]
        if self._uploaded.get(step) != files:
            self._client.log_artifacts(self._run, str(path), place)
            self._uploaded[step] = files
        if best:
            self._client.set_tag(self._run, "best_checkpoint", place)

    def mark_preempted(self) -> None:
        """The run then ends as ``KILLED``."""
        self._preempted = True

    def close(self, *, failed: bool) -> None:
        """Ends the run as ``FINISHED``, ``FAILED`` or, where another process is to continue it, ``KILLED``."""
        status = "FAILED" if failed else "KILLED" if self._preempted else "FINISHED"
        try:
            if self._run:
                self._client.set_terminated(self._run, status)
        finally:
            _RETRIES.removeFilter(self._told)

    def _find(self, run: RunInfo) -> str:
        """The run of this name's id in the experiment; empty if there is none."""
        given = os.environ.get("MLFLOW_RUN_ID")
        if given:
            return str(self._client.get_run(given).info.run_id)
        found = self._client.search_runs([self._experiment_id()], f"tags.`{_ID}` = '{run.id}'", max_results=1)
        return str(found[0].info.run_id) if found else ""

    def _create(self, run: RunInfo) -> str:
        tags = {_ID: run.id, "mlflow.source.type": "LOCAL", "run_directory": str(run.folder)}
        if run.git_commit:
            tags["mlflow.source.git.commit"] = run.git_commit
        return str(self._client.create_run(self._experiment_id(), tags=tags, run_name=run.folder.name).info.run_id)

    def _experiment_id(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME")
        if not name and (given := os.environ.get("MLFLOW_EXPERIMENT_ID")):
            return given
        from mlflow.exceptions import MlflowException  # noqa: PLC0415

        try:
            return str(self._client.create_experiment(name or "distaccum"))
        except MlflowException:  # it is there
            if (found := self._client.get_experiment_by_name(name or "distaccum")) is None:
                raise
            return str(found.experiment_id)

    def _log_params(self, run: RunInfo) -> None:
        """Settings, which MLflow lets nobody change: what a resumed run has changed is a tag ``resumed.KEY``."""
        from mlflow.entities import Param  # noqa: PLC0415

        known = self._client.get_run(self._run).data.params
        given = dict(flat({**run.config, "plan": run.plan, "git_commit": run.git_commit}))
        new = [Param(key, value) for key, value in given.items() if key not in known]
        for first in range(0, len(new), _PARAMS):
            self._client.log_batch(self._run, params=new[first : first + _PARAMS])
        for key, value in given.items():
            if known.get(key, value) != value:
                self._client.set_tag(self._run, f"resumed.{key}"[:_KEY], value)


class ToldOnce(logging.Filter):
    """Tells of the first of the repeated requests of the thread that makes it, in our words, and of no other."""

    def __init__(self) -> None:
        super().__init__()
        self._thread, self._told = current_thread(), False  # not its number, which the next one may have

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line is let through: it is of another thread, or tells of something else."""
        if current_thread() is not self._thread or not record.getMessage().startswith("Retrying "):
            return True
        if not self._told:
            self._told = True
            _log.warning("logger mlflow: its server does not answer, and is asked again while the run goes on")
        return False


def flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested settings as ``optim.lr`` and a text, cut to what MLflow takes; lists are JSON."""
    for key, value in settings.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{name}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            yield _key(name), text[:_VALUE]


def _key(name: str) -> str:
    """A name that MLflow takes: one that is another path, as ``hf://set``, it refuses with all of the request."""
    key = _NOT_IN_KEYS.sub("_", name)[:_KEY]
    if key.startswith((".", "/")) or posixpath.normpath(key) != key:
        key = re.sub(r"^\.|/", "_", key) or "_"
    return key
