"""Weights & Biases in a separate thread, where it can neither stop nor delay training."""

from __future__ import annotations

import logging
import queue
import sys
from collections.abc import Mapping
from pathlib import Path
from threading import Thread
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
        folder: where W&B keeps its files; ``wandb sync`` uploads an offline run from there.
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
        self._thread.join(_CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            _warn(
                f"still busy after {_CLOSE_TIMEOUT_S:.0f} s, and left behind; metrics.jsonl has every record, and "
                f"`wandb sync` uploads what is in {self._settings['dir']}"
            )

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
                    run.log(dict(record))
            if self._preempted:
                run.mark_preempting()
            run.finish(exit_code=self._exit_code)
        except Exception as error:  # whatever fails in there is no reason to lose a training run
            _warn(f"{type(error).__name__}: {error}; metrics.jsonl has every record")


def is_left_behind() -> bool:
    """Whether the logger was closed while W&B hung: W&B's exit handlers would then keep the process from ending."""
    return any(thread.name == _THREAD for thread in enumerate_threads())


def _warn(message: str) -> None:
    _log.warning("Weights & Biases: %s", message)
