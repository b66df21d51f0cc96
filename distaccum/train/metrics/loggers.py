"""The base of loggers, and the one that is always on: ``metrics.jsonl``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Record = Mapping[str, Any]


class Logger:
    """Writes records, on rank 0. Inherit from it: what a logger leaves out does nothing."""

    def log(self, record: Record) -> None:
        """Writes one record; its own failures never end the training."""

    def alert(self, title: str, text: str) -> None:
        """Notifies the user of something that needs attention."""

    def mark_preempted(self) -> None:
        """Marks a run that another process is to continue; called before :meth:`close`."""

    def close(self, *, failed: bool) -> None:
        """Called once, however the run ends."""


class JsonlLogger(Logger):
    """Appends one JSON object a line; every line is whole on disk before the next update."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def log(self, record: Record) -> None:
        """Writes the numbers unrounded."""
        self._file.write(json.dumps(record) + "\n")

    def close(self, *, failed: bool) -> None:
        """Closes the file."""
        self._file.close()


def rewind_jsonl(path: Path, window: int) -> None:
    """Moves the lines past ``window``, and a torn last one, to ``metrics.superseded.jsonl``, before a run resumes.

    The resumed run repeats those windows, so each is in ``metrics.jsonl`` once, and nothing is lost.
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
    """The window of a line; infinity for a line that was cut short."""
    try:
        return int(json.loads(line)["window"])
    except (ValueError, KeyError, TypeError):
        return math.inf
