"""TensorBoard's event files, which end at no death of the run with less than the last checkpoint's records."""

from __future__ import annotations

import io
import json
import os
import socket
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from mmap import ACCESS_READ, mmap
from pathlib import Path
from struct import unpack_from
from typing import Any

from distaccum.train.metrics.loggers import TEXTS, Logger, Record, RunInfo, records_of

_EVALUATION = "eval_"
_EVENTS = "events.out.tfevents."
_PLACE = "train/window"  # is in every record
_HEADER, _FOOTER = 12, 4  # bytes


class TensorBoardLogger(Logger):
    """Scalars over ``window`` in ``tensorboard/`` of the run directory, and the configuration as text.

    A run that resumes tells TensorBoard to forget what it repeats, and writes the earlier records that the event files
    lack: those of a run without TensorBoard, or that no longer fitted on the disk. What did not fit is also tried again
    before each checkpoint, and at the end.
    """

    def begin(self, run: RunInfo) -> None:
        """Opens an event file."""
        folder = run.folder / "tensorboard"
        folder.mkdir(exist_ok=True)
        self._metrics, self._lacks = run.folder / "metrics.jsonl", False
        there = _shown_until(folder)
        self._shown = min(run.window, there or 0)  # the last window that TensorBoard shows
        self._file = _EventFile(folder, None if there is None else self._shown + 1)
        self._catch_up()
        about = {"config": run.config, "plan": run.plan, "git_commit": run.git_commit}
        for name, content in about.items():
            self._file.add(_text(name, _as_code(content)), run.window)

    def log(self, record: Record) -> None:
        """Writes the record to the event file.

        Raises:
            OSError: the disk is full, or gone; records are then left to :meth:`sync` and :meth:`close`.
        """
        if not self._lacks:
            self._write([record])

    def sync(self) -> None:
        """Writes what could not be written before."""
        if self._lacks:
            self._catch_up()

    def alert(self, title: str, text: str) -> None:
        """Shows it among the texts."""
        self._file.add(_text("alert", f"**{title}**: {text}"), self._shown)

    def close(self, *, failed: bool) -> None:
        """Writes what could not be written before."""
        self.sync()

    def _catch_up(self) -> None:
        self._write(record for record in records_of(self._metrics) if record["window"] > self._shown)

    def _write(self, records: Iterable[Mapping[str, Any]]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary  # noqa: PLC0415

        self._lacks = True
        for record in records:
            numbers = {tag_of(name): float(value) for name, value in record.items() if isinstance(value, int | float)}
            # One event for all of them: it is whole in the file, or not there.
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in numbers.items()])
            for number, one in enumerate(record.get(TEXTS, ())):
                summary.value.extend(_text(f"eval/text_{number}", _as_code(one["prompt"] + one["text"])).value)
            self._file.add(summary, record["window"])
            self._shown = record["window"]
        self._lacks = False


class _EventFile:
    """An event file whose every event is whole on the disk when the call returns, or not there.

    TensorBoard's own writer is a thread, which an error ends with a traceback, and with part of an event.

    Args:
        folder: of the file.
        purged: the step from which on TensorBoard is to forget what other files have; None: it forgets nothing.
    """

    def __init__(self, folder: Path, purged: int | None) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog  # noqa: PLC0415

        name = f"{_EVENTS}{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        self.path = folder / name  # the newest is the last by name
        self._append(file_version="brain.Event:2")
        if purged is not None:
            self._append(step=purged, session_log=SessionLog(status=SessionLog.START))

    def add(self, summary: Any, step: int) -> None:
        """Appends an event.

        Raises:
            OSError: it cannot be written; the file ends with the event before.
        """
        self._append(step=step, summary=summary)

    def _append(self, **event: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # noqa: PLC0415
        from tensorboard.summary.writer.record_writer import RecordWriter  # noqa: PLC0415

        framed = io.BytesIO()
        RecordWriter(framed).write(Event(wall_time=time.time(), **event).SerializeToString())
        content = framed.getvalue()
        with self.path.open("ab", buffering=0) as file:
            before = os.fstat(file.fileno()).st_size
            try:
                written = file.write(content)
                if written != len(content):  # what still fitted on the disk; the rest says why
                    file.write(content[written:])
            except OSError as error:
                with suppress(OSError):
                    os.truncate(self.path, before)
                raise OSError(error.errno, error.strerror, str(self.path)) from error


def _shown_until(folder: Path) -> int | None:
    """The last window that TensorBoard shows of what is in the folder; None where nothing is.

    Each process begins with what the ones before it lack, so that the newest file which tells it tells of all.
    """
    files = sorted(folder.glob(f"{_EVENTS}*"), reverse=True)
    for path in files:
        if (until := _last_window(path)) is not None:
            return until
    return 0 if files else None


def _last_window(path: Path) -> int | None:
    """The last window of an event file, or the one before which it begins; None where it does not tell."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # noqa: PLC0415

    if not path.stat().st_size:
        return None
    with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as content:
        for start, end in reversed(_frames(content)):
            with suppress(Exception):  # an event that is damaged
                event = Event.FromString(content[start:end])
                if event.session_log.status == SessionLog.START:
                    return int(event.step) - 1
                if any(value.tag == _PLACE for value in event.summary.value):
                    return int(event.step)
    return None


def _frames(content: mmap) -> list[tuple[int, int]]:
    """Where the events of a file begin and end: behind 8 bytes of length and 4 of a checksum, before another one.

    A file of a million events is one of a second so, and of minutes where all are read.
    """
    found, at = [], 0
    while at + _HEADER <= len(content):
        (length,) = unpack_from("<Q", content, at)
        at += _HEADER + length + _FOOTER
        if at > len(content):  # cut short
            break
        found.append((at - _FOOTER - length, at - _FOOTER))
    return found


def tag_of(name: str) -> str:
    """The tag of a number of ``metrics.jsonl``: ``train/loss``; of an evaluation's, ``eval/loss``."""
    return f"eval/{name.removeprefix(_EVALUATION)}" if name.startswith(_EVALUATION) else f"train/{name}"


def _text(name: str, content: str) -> Any:
    from torch.utils.tensorboard.summary import text  # noqa: PLC0415

    return text(name, content)  # type: ignore[no-untyped-call]


def _as_code(content: Any) -> str:
    """A text that TensorBoard, which shows Markdown, leaves as it is."""
    text = content if isinstance(content, str) else json.dumps(content, indent=2, default=str)
    lines = text.splitlines()
    return "\n".join(f"    {line}" for line in lines)
