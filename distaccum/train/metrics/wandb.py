"""Weights & Biases at arm's length: in a thread of its own, so that it can neither stop nor delay training."""

from __future__ import annotations

import queue
import sys
from collections.abc import Mapping
from pathlib import Path
from threading import Thread
from threading import enumerate as enumerate_threads
from typing import Any

from distaccum.train.metrics.loggers import Record

_THREAD = "wandb-sink"
_CLOSE_TIMEOUT_S = 8.0
_INIT_TIMEOUT_S = 120.0  # in its own thread, so patience costs nothing


class WandbLogger:
    """Sends records to a W&B run. Trouble is reported once on stderr, and the rest of the run goes without.

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
        """Has W&B send a mail or a message, as its user has set it up; returns at once."""
        self._records.put((title, text))

    def mark_preempted(self) -> None:
        """W&B then shows the run as preempted, until the next process takes it up."""
        self._preempted = True

    def close(self, *, failed: bool) -> None:
        """Waits a few seconds for what was handed over to be written."""
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

            settings = wandb.Settings(silent=True, console="off", init_timeout=_INIT_TIMEOUT_S)
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
    """Whether a sink was closed while W&B hung: its exit handlers would then hold up the whole process."""
    return any(thread.name == _THREAD for thread in enumerate_threads())


def _warn(message: str) -> None:
    print(f"distaccum: Weights & Biases: {message}", file=sys.stderr)  # noqa: T201
