"""TensorBoard's event files, written by torch's ``SummaryWriter``."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from typing import Any

from distaccum.train.metrics.loggers import TEXTS, Logger, Record, RunInfo, records_of

_EVALUATION = "eval_"


class TensorBoardLogger(Logger):
    """Scalars over ``window`` in ``tensorboard/`` of the run directory, and the configuration as text.

    A run that resumes tells TensorBoard to forget what it repeats (``purge_step``). Where there are no event files yet,
    it writes the records of the processes before.
    """

    def begin(self, run: RunInfo) -> None:
        """Opens an event file."""
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415

        folder = run.folder / "tensorboard"
        continues = any(folder.glob("events.out.tfevents.*"))
        self._writer: Any = SummaryWriter(folder, purge_step=run.window + 1 if continues else None)
        self._window = run.window
        for record in () if continues else records_of(run.folder / "metrics.jsonl"):
            self._write(record)
        for name, content in {"config": run.config, "plan": run.plan, "git_commit": run.git_commit}.items():
            self._writer.add_text(name, _as_code(content), run.window)
        self._writer.flush()
        self._hook, threading.excepthook = threading.excepthook, self._note_dead_thread

    def log(self, record: Record) -> None:
        """Writes the record to the event file."""
        self._write(record)
        self._writer.flush()

    def alert(self, title: str, text: str) -> None:
        """Shows it among the texts."""
        self._writer.add_text("alert", f"**{title}**: {text}", self._window)

    def close(self, *, failed: bool) -> None:
        """Closes the event file."""
        try:
            self._writer.close()
        finally:
            if threading.excepthook == self._note_dead_thread:  # nobody has set another meanwhile
                threading.excepthook = self._hook

    def _note_dead_thread(self, dead: threading.ExceptHookArgs) -> None:
        """Prints nothing of the writer's own thread, as on a full disk: the next call raises what it has raised."""
        if not type(dead.thread).__module__.startswith("tensorboard."):
            self._hook(dead)

    def _write(self, record: Record) -> None:
        self._window = record["window"]
        for name, value in record.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(tag_of(name), value, self._window)
            elif isinstance(value, Mapping):
                lines = [value["columns"], ["---"] * len(value["columns"]), *value["rows"]]
                table = "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
                self._writer.add_text(tag_of(name), table, self._window)
        for number, one in enumerate(record.get(TEXTS, ())):
            self._writer.add_text(f"eval/text_{number}", _as_code(one["prompt"] + one["text"]), self._window)


def tag_of(name: str) -> str:
    """The tag of a number of ``metrics.jsonl``: ``train/loss``; of an evaluation's, ``eval/loss``."""
    return f"eval/{name.removeprefix(_EVALUATION)}" if name.startswith(_EVALUATION) else f"train/{name}"


def _as_code(content: Any) -> str:
    """A text that TensorBoard, which shows Markdown, leaves as it is."""
    text = content if isinstance(content, str) else json.dumps(content, indent=2, default=str)
    return "\n".join(f"    {line}" for line in text.splitlines())
