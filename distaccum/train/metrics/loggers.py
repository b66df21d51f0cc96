"""The base of loggers, and the one that is always on: ``metrics.jsonl``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from distaccum.errors import MisuseError
from distaccum.program import RECORD_FILE, load

# The names of a window's record, or patterns of them; what an evaluation gives begins with ``eval_``.

MEASURED = (
    "samples_per_s",
    "tokens_per_s",
    "step_time_s",
    "data_wait_s",
    "memory_bytes",
    "memory_reserved_bytes",
    "memory_retries",
    "tflops_per_rank",
    "mfu",
    "slowest_rank",
    "slowest_over_median",
)
"""What a clock or the machine says: two runs that train the same differ in it."""
OF_RECORDS = (
    "step",
    "window",
    "epoch",
    "loss",
    "loss_*",
    "grad_norm",
    "grad_norm_zscore",
    "lr",
    "loss_scale",
    "noise_scale*",
    "longest_over_mean",
    "applied",
    "skipped",
    "nonfinite",
    "underflow_share",
    "samples",
    "tokens",
    *MEASURED,
    "recompiles",
    "ranks",
    "spikes",
    "rollbacks",
)


def refuse_taken(names: Iterable[str], whose: str) -> None:
    """Refuses names of somebody's own numbers that a record has already.

    Raises:
        MisuseError: one is a window's or an evaluation's.
    """
    for name in map(str, names):
        if name.startswith("eval_") or any(fnmatchcase(name, one) for one in OF_RECORDS):
            raise MisuseError(f"{whose} {name!r}, which is a name of every record's own: use another, as own_{name}")


Record = Mapping[str, Any]
TEXTS = "eval_texts"
"""Texts of a record, each with its ``prompt`` and the ``text`` that follows; mappings are tables, all else numbers."""


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """A run as loggers are told of it before its first record."""

    folder: Path
    """The run directory; ``metrics.jsonl`` in it has the records of the processes before."""
    id: str
    """The same in every process of a run that is resumed."""
    window: int
    """The attempts so far: 0 for a run that begins. Every record that follows has a larger ``window``."""
    step: int
    """The applied updates so far: less than ``window`` where attempts were skipped."""
    total_steps: int
    """Applied updates of the whole run."""
    config: Mapping[str, Any]
    """Every setting by the keys of ``conf/``, nested, without secrets."""
    plan: Mapping[str, Any]
    """What ``plan.json`` says."""
    git_commit: str | None = None


class Logger:
    """Writes records, on rank 0. Inherit from it, and write :meth:`begin`, :meth:`log` and :meth:`close`.

    Every method may be left out: it then does nothing. They are called by the training's own thread, which waits for
    them. What one of them raises is told once as a warning, and the run goes on.
    """

    def begin(self, run: RunInfo) -> None:
        """Called once, before the first record."""

    def log(self, record: Record) -> None:
        """Takes one record: a line of ``metrics.jsonl``, numbers by name. ``window`` is in no two of a run.

        With ``eval.samples`` a record of an evaluation has ``eval_texts`` beside them: a list of mappings with a
        ``prompt`` and the ``text`` that follows it. A matrix of a metric is a mapping with ``columns`` and ``rows``.
        """

    def sync(self) -> None:
        """Called before a checkpoint is saved, which what was logged has to survive as well."""

    def alert(self, title: str, text: str) -> None:
        """Notifies the user of something that needs attention."""

    def checkpoint(self, path: Path, *, step: int, best: bool) -> None:
        """Called when the checkpoint of ``step`` is whole at ``path``, which may be removed after later ones.

        ``best``: it is that of the best evaluation so far, by ``checkpoint.best``. A checkpoint that is found to be the
        best after it was saved is told of again.
        """

    def mark_preempted(self) -> None:
        """Marks a run that another process is to continue; called before :meth:`close`."""

    def close(self, *, failed: bool) -> None:
        """Called once, however the run ends."""


class JsonlLogger(Logger):
    """Appends one JSON object a line; every line is whole on disk before the next update."""

    def __init__(self, path: Path) -> None:
        self._file = load(RECORD_FILE)(path)

    def log(self, record: Record) -> None:
        """Writes the numbers unrounded.

        Raises:
            OSError: the disk is full, or gone; the file then ends with the record before.
        """
        self._file.append(json.dumps(record).encode() + b"\n")

    def sync(self) -> None:
        """Forces what was logged to the disk: a machine that goes down keeps the records of what it has saved."""
        self._file.sync()

    def close(self, *, failed: bool) -> None:
        """Closes the file."""
        self._file.close()


def records_of(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a ``metrics.jsonl``, without lines that are none."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            with suppress(ValueError, TypeError):  # cut short, or damaged
                yield dict(json.loads(line))
