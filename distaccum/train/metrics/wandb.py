"""Weights & Biases in a separate thread, where it can neither stop nor delay training.

``metrics.jsonl`` has every record, whatever becomes of W&B: ``distaccum-wandb-upload RUN`` makes a W&B run of it.
"""

from __future__ import annotations

import json
import logging
import queue
import sys
from argparse import ArgumentParser
from collections.abc import Mapping
from pathlib import Path
from threading import Event, Thread
from threading import enumerate as enumerate_threads
from typing import Any

from distaccum.config.secrets import redact
from distaccum.train.metrics.loggers import Logger, Record

_log = logging.getLogger(__name__)

_THREAD = "wandb-logger"
_CLOSE_TIMEOUT_S = 8.0
_INIT_TIMEOUT_S = 120.0  # in its own thread, so patience costs nothing


class WandbLogger(Logger):
    """Sends records to a W&B run. After a failure it warns once, and the rest of the run is not sent.

    Args:
        folder: the run directory, where W&B keeps its files; ``wandb sync`` uploads an offline run from there.
        mode: ``offline`` or ``online``.
        project: W&B project.
        name: display name; None for W&B's own.
        tags: of the run.
        run_id: the same id on a resume continues the same run.
        config: shown with the run.
    """

    def __init__(
        self,
        folder: Path,
        *,
        mode: str,
        project: str,
        name: str | None,
        tags: list[str],
        run_id: str,
        config: Mapping[str, Any],
    ) -> None:
        self._settings = {
            "dir": str(folder),
            "mode": mode,
            "project": project,
            "name": name,
            "tags": tags,
            "id": run_id,
            "resume": "allow",
            "config": dict(config),
            "reinit": "create_new",
        }
        self._exit_code, self._preempted = 0, False
        self._ended = Event()
        self._records: queue.SimpleQueue[Record | tuple[str, str] | None] = queue.SimpleQueue()
        self._thread = Thread(target=self._work, name=_THREAD, daemon=True)
        self._thread.start()

    def log(self, record: Record) -> None:
        """Hands the record over; returns at once."""
        self._records.put(dict(record))

    def alert(self, title: str, text: str) -> None:
        """Sends an alert, which W&B passes on by mail or message; returns at once."""
        self._records.put((title, text))

    def mark_preempted(self) -> None:
        """Marks the run as preempted, which W&B shows until the next process resumes it."""
        self._preempted = True

    def close(self, *, failed: bool) -> None:
        """Waits a few seconds for the records to be written."""
        self._exit_code = int(failed or self._preempted)  # W&B takes one that ends with 0 for finished
        self._records.put(None)
        if not self._ended.wait(_CLOSE_TIMEOUT_S):
            _warn(f"still busy after {_CLOSE_TIMEOUT_S:.0f} s, and left behind; {self._remedy}")

    @property
    def _remedy(self) -> str:
        return f"metrics.jsonl has every record: distaccum-wandb-upload {self._settings['dir']} makes a W&B run of it"

    def _work(self) -> None:
        try:
            import wandb  # noqa: PLC0415  a second of imports that only this thread should wait for

            secret = redact(sys.argv) != sys.argv  # W&B's description of the process has the command line as it is
            settings = wandb.Settings(silent=True, console="off", init_timeout=_INIT_TIMEOUT_S, x_disable_meta=secret)
            run = wandb.init(**self._settings, settings=settings)  # type: ignore[arg-type]
            run.define_metric("step")
            run.define_metric("*", step_metric="step")
            while (record := self._records.get()) is not None:
                if isinstance(record, tuple):
                    run.alert(*record, level="WARN")
                else:
                    # By the window: what a resumed run repeats, W&B has already, and passes over.
                    run.log(dict(record), step=record.get("window"))
            if self._preempted:
                run.mark_preempting()
            run.finish(exit_code=self._exit_code)
        except Exception as error:  # whatever fails in there is no reason to lose a training run
            _warn(f"{type(error).__name__}: {error}; {self._remedy}")
            self._ended.set()
            Event().wait()  # W&B's exit handlers would fail too, at length: see is_left_behind
        self._ended.set()


def is_left_behind() -> bool:
    """Whether W&B hung or failed: its exit handlers would then keep the process from ending, or print tracebacks."""
    return any(thread.name == _THREAD for thread in enumerate_threads())


def _warn(message: str) -> None:
    _log.warning("Weights & Biases: %s", message)


def upload(run_dir: Path, *, mode: str = "online", run_id: str | None = None) -> int:
    """Makes a W&B run of ``metrics.jsonl``, each record once, with the configuration of the newest checkpoint.

    Args:
        run_dir: of a run that trains no more.
        mode: ``online``, or ``offline`` for a folder that ``wandb sync`` uploads.
        run_id: of the W&B run, which must be a new one; None for a new id.

    Returns:
        how many records.

    Raises:
        OSError: there is no ``metrics.jsonl``.
    """
    import wandb  # noqa: PLC0415

    lines = (run_dir / "metrics.jsonl").read_bytes().splitlines()
    config = _saved_config(run_dir)
    about = config.get("metrics", {}).get("wandb", {})
    number = 0
    with wandb.init(
        dir=str(run_dir),
        mode="offline" if mode == "offline" else "online",
        id=run_id,
        project=about.get("project", "distaccum"),
        name=about.get("name"),
        tags=about.get("tags"),
        config={"config": config},
        settings=wandb.Settings(silent=True, console="off", init_timeout=_INIT_TIMEOUT_S, x_disable_meta=True),
    ) as run:
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        for line in lines:
            try:
                record = dict(json.loads(line))
            except (ValueError, TypeError):  # cut short, or damaged
                continue
            run.log(record, step=record.get("window"))
            number += 1
    return number


def _saved_config(run_dir: Path) -> dict[str, Any]:
    """Without secrets, as they are saved; empty without a checkpoint."""
    try:
        latest = (run_dir / "checkpoints" / "latest").read_text().strip()
        saved: dict[str, Any] = json.loads((run_dir / "checkpoints" / latest / "state.json").read_bytes())["config"]
    except (OSError, ValueError, KeyError):
        return {}
    return saved


def main() -> None:
    """``distaccum-wandb-upload RUN``: exit code 0, or 1 and one line on stderr."""
    parser = ArgumentParser(prog="distaccum-wandb-upload", description="Makes a W&B run of a run's metrics.jsonl.")
    parser.add_argument("run", type=Path, help="the run directory")
    parser.add_argument("--id", help="of the new W&B run (default: a new one)")
    parser.add_argument("--offline", action="store_true", help="into a folder that `wandb sync` uploads")
    given = parser.parse_args()
    try:
        number = upload(given.run, mode="offline" if given.offline else "online", run_id=given.id)
    except Exception as error:  # W&B's own, of many kinds
        sys.exit(f"distaccum-wandb-upload: {type(error).__name__}: {error}")
    sys.stdout.write(f"{number} records of {given.run / 'metrics.jsonl'}\n")


if __name__ == "__main__":
    main()
