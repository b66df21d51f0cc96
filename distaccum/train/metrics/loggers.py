"""The base of loggers, and the one that is always on: ``metrics.jsonl``."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from distaccum.checkpoint.files import retried, write_bytes
from distaccum.errors import MisuseError, shorten

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


_log = logging.getLogger(__name__)

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
        self._path = path
        self._file = path.open("ab", buffering=0)

    def log(self, record: Record) -> None:
        """Writes the numbers unrounded.

        Raises:
            OSError: the disk is full, or gone; the file then ends with the record before.
        """
        line = json.dumps(record).encode() + b"\n"
        try:
            retried(partial(self._append, line))
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    def _append(self, line: bytes) -> None:
        before = os.fstat(self._file.fileno()).st_size
        try:
            written = self._file.write(line)
            if written != len(line):  # what still fitted on the disk; the rest says why
                self._file.write(line[written:])
        except OSError:
            with suppress(OSError):
                os.truncate(self._path, before)
            raise

    def sync(self) -> None:
        """Forces what was logged to the disk: a machine that goes down keeps the records of what it has saved."""
        os.fsync(self._file.fileno())

    def close(self, *, failed: bool) -> None:
        """Closes the file."""
        try:
            self.sync()
        finally:
            self._file.close()


def records_of(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a ``metrics.jsonl``, without lines that are none."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            with suppress(ValueError, TypeError):  # cut short, or damaged
                yield dict(json.loads(line))


def last_window(path: Path) -> int:
    """The window of the last whole line of a ``metrics.jsonl``; 0 without one."""
    try:
        lines = retried(path.read_bytes, of=path).splitlines()
    except FileNotFoundError:
        return 0
    places = (_place(line)[0] for line in reversed(lines))
    return next((int(at) for at in places if at < math.inf), 0)


def rewind_jsonl(
    path: Path,
    window: int,
    *,
    logged: Mapping[str, int] | None = None,
    before_writing: Callable[[], None] = lambda: None,
) -> None:
    """Moves the lines past ``window`` of ``NAME.jsonl`` to ``NAME.superseded.jsonl``, before a run resumes.

    The resumed run repeats those windows, so each is in ``NAME.jsonl`` once, and nothing is lost. Lines that are no
    records, such as one that was cut short or has a damaged byte, go there as well, and the log says so; so it does
    where the records end before ``logged``, window and step of the last one when the checkpoint was saved. What
    ``before_writing`` raises leaves the file as it was.
    """
    aside = path.with_name(f"{path.stem}.superseded.jsonl")
    kept: list[bytes] = []
    superseded: list[bytes] = []
    damaged: list[int] = []
    last = last_step = 0
    try:
        lines = retried(path.read_bytes, of=path).splitlines(keepends=True)
    except FileNotFoundError:
        lines = []
    for number, line in enumerate(lines, 1):
        at, step = _place(line)
        if at == math.inf or (at <= last and line.endswith(b"\n")):
            damaged.append(number)
        if last < at <= window:
            kept.append(line)
            last, last_step = int(at), step
        else:
            superseded.append(line)
    if superseded:
        before_writing()
        with aside.open("ab") as file:
            file.writelines(line if line.endswith(b"\n") else line + b"\n" for line in superseded)
            file.flush()
            os.fsync(file.fileno())
        write_bytes(path, b"".join(kept))
    if damaged:
        text = "%s: line %s is damaged, and was moved as it is to %s"
        _log.warning(text, path, shorten(damaged), aside.name)
    if logged and last < logged.get("window", 0):
        text = "%s: the records after step %d are lost, up to step %d (window %d)"
        _log.warning(text, path, last_step, logged.get("step", 0), logged["window"])


def _place(line: bytes) -> tuple[float, int]:
    """The window and the step of a line; an infinite window for a line that is no record."""
    try:
        record = json.loads(line)
        return int(record["window"]), int(record.get("step", 0))
    except (ValueError, RecursionError, KeyError, TypeError, OverflowError):
        return math.inf, 0
