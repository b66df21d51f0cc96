"""Where records go: a file, the console. (W&B is in ``wandb_sink``.)"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Record = Mapping[str, Any]


class Logger(Protocol):
    """Takes records on rank 0."""

    def log(self, record: Record) -> None:
        """Takes one record; never raises for the sink's own trouble once training has begun."""

    def alert(self, title: str, text: str) -> None:
        """Tells somebody who is not looking."""

    def mark_preempted(self) -> None:
        """Before :meth:`close`, of a run that another process is to continue."""

    def close(self, *, failed: bool) -> None:
        """Called once, at the end of the run however it ends."""


class JsonlLogger:
    """One JSON object a line; every line is whole on disk before the next update. Appends to what is there."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def log(self, record: Record) -> None:
        """Writes the numbers unrounded."""
        self._file.write(json.dumps(record) + "\n")

    def alert(self, title: str, text: str) -> None:
        """Nothing: the records say it."""

    def mark_preempted(self) -> None:
        """Nothing: the next process appends."""

    def close(self, *, failed: bool) -> None:
        """Closes the file."""
        self._file.close()


def rewind_jsonl(path: Path, window: int) -> None:
    """Before a resumed run appends: moves lines past ``window`` (and a torn last one) to ``metrics.superseded.jsonl``.

    The resumed run makes those attempts again, so that each stands in ``metrics.jsonl`` once; nothing is lost.
    """
    if not path.exists():
        return
    lines = path.read_text().splitlines(keepends=True)
    kept: list[str] = []
    superseded: list[str] = []
    for line in lines:
        (kept if _window(line) <= window else superseded).append(line)
    if superseded:
        with path.with_name("metrics.superseded.jsonl").open("a") as file:
            file.writelines(line if line.endswith("\n") else line + "\n" for line in superseded)
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(kept))
        temporary.replace(path)


def _window(line: str) -> float:
    """The line's attempt; beyond all for a line that was cut short."""
    try:
        return int(json.loads(line)["window"])
    except (ValueError, KeyError, TypeError):
        return math.inf


class ConsoleLogger:
    """A live progress line on a terminal, plain lines elsewhere.

    Args:
        total_steps: updates of the whole run.
        console: where to print.
    """

    def __init__(self, total_steps: int, console: Console) -> None:
        self._console, self._total = console, total_steps
        self._progress: Progress | None = None
        if console.is_terminal:
            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
            self._progress = Progress(*columns, console=console)
            self._task = self._progress.add_task("", total=total_steps)
            self._progress.start()

    def log(self, record: Record) -> None:
        """One line a record."""
        line = (
            f"loss {record['loss']:.4f}  grad norm {record['grad_norm']:.3f}  lr {record['lr']:.2e}  "
            f"{record['tokens_per_s']:,.0f} tokens/s"
        )
        if record["loss_scale"] != 1.0:
            line += f"  loss scale {record['loss_scale']:.10g}"
        if "underflow_share" in record:
            line += f"  underflow {record['underflow_share']:.2%}"
        if record["skipped"]:
            line += f"  skipped {record['skipped']}"
        if not record["applied"]:
            line += "  SKIPPED: the gradient is NaN or infinite"
        evaluated = "".join(
            f"  {name.removeprefix('eval_').replace('_', ' ')} {value:.4f}"
            for name, value in record.items()
            if name.startswith("eval_")
        )
        if evaluated:
            line += f"  held-out:{evaluated}"
        if self._progress is None:
            self._console.print(f"step {record['step']:>6}/{self._total}  {line}", highlight=False, soft_wrap=True)
        else:
            self._progress.update(self._task, completed=record["step"], description=line)

    def alert(self, title: str, text: str) -> None:
        """One line."""
        self._console.print(f"{title}: {text}", style="bold red", highlight=False, soft_wrap=True)

    def mark_preempted(self) -> None:
        """Nothing: the report says it."""

    def close(self, *, failed: bool) -> None:
        """Leaves the last progress line standing."""
        if self._progress is not None:
            self._progress.stop()
