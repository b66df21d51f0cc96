"""TensorBoard's event files, which end at no death of the run with less than the last checkpoint's records."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from distaccum.train.metrics.loggers import Logger, Record, RunInfo, records_of

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_EVALUATION = "eval_"


class TensorBoardLogger(Logger):
    """Scalars over ``window`` in ``tensorboard/`` of the run directory, and the configuration as text.

    A run that resumes tells TensorBoard to forget what it repeats. Where there are no event files yet, its earlier
    records are written too.
    """

    def begin(self, run: RunInfo) -> None:
        """Opens an event file."""
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415

        folder = run.folder / "tensorboard"
        is_first = not any(folder.glob("events.out.tfevents.*"))
        purged = None if is_first else run.window + 1
        self._writer: SummaryWriter = SummaryWriter(str(folder), purge_step=purged)
        about = {"config": run.config, "plan": run.plan, "git_commit": run.git_commit}
        for name, content in about.items():
            self._writer.add_text(name, _as_code(content), run.window)
        if is_first:
            for record in records_of(run.folder / "metrics.jsonl"):
                self._write(record)
        self._writer.flush()

    def log(self, record: Record) -> None:
        """Writes the record to the event file."""
        self._write(record)
        self._writer.flush()  # or a run that is killed loses those of the last two minutes

    def alert(self, title: str, text: str) -> None:
        """Shows it among the texts."""
        self._writer.add_text("alert", f"**{title}**: {text}")

    def close(self, *, failed: bool) -> None:
        """Closes the event file."""
        self._writer.close()

    def _write(self, record: Mapping[str, Any]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary  # noqa: PLC0415

        numbers = {tag_of(name): float(value) for name, value in record.items() if isinstance(value, int | float)}
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in numbers.items()]
        writer = self._writer.file_writer
        assert writer is not None  # until it is closed
        # One event and one write for all of them, where add_scalar makes an event of each.
        writer.add_summary(Summary(value=values), record["window"])


def tag_of(name: str) -> str:
    """The tag of a number of ``metrics.jsonl``: ``train/loss``; of an evaluation's, ``eval/loss``."""
    return f"eval/{name.removeprefix(_EVALUATION)}" if name.startswith(_EVALUATION) else f"train/{name}"


def _as_code(content: Any) -> str:
    """A text that TensorBoard, which shows Markdown, leaves as it is."""
    lines = json.dumps(content, indent=2, default=str).splitlines()
    return "\n".join(f"    {line}" for line in lines)
