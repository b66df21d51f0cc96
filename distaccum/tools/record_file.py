"""The lines of a run's ``metrics.jsonl`` and ``windows.jsonl``: appended whole, and taken back before a run resumes.

A run of weeks has a million of them, so what resumes reads the end alone; and somebody may remove the file, edit it or
cut it meanwhile, which is seen at the next line. Begin with :class:`RecordFile`.
"""

from __future__ import annotations

import errno
import io
import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

from distaccum.checkpoint.files import ABSENT, replace_file, retried, write_bytes
from distaccum.errors import shorten
from distaccum.train.owner import OwnershipLostError, read_holder

_log = logging.getLogger(__name__)

TAIL = 8 << 20
"""Bytes at the end of a file that a resumed run reads: some 20,000 records."""


class RecordFile:
    """Appends lines; every line is whole in the file once :meth:`append` has returned.

    Where the file is not the one that is open any more, it is opened anew, and gets what it lacks of the one before,
    which is still there while it is open. Another run that takes the folder over puts a file of its own there, too: the
    new file is opened before its owner is looked at, so nothing is ever written into one of another run.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = self._opened()
        self._size = os.fstat(self._file.fileno()).st_size
        self._owner = self._token()

    def append(self, line: bytes) -> None:
        """Writes a line.

        Raises:
            OSError: the disk is full, or gone; the file then ends with the line before.
            OwnershipLostError: another run has taken the folder over.
        """
        try:
            retried(partial(self._append, line))
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    def sync(self) -> None:
        """Forces what was written to the disk."""
        self._require_it()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file, once it is on the disk."""
        try:
            self.sync()
        finally:
            self._file.close()

    def _append(self, line: bytes) -> None:
        before = self._require_it()
        try:
            written = self._file.write(line)
            if written != len(line):  # what still fitted on the disk; the rest says why
                self._file.write(line[written:])
        except OSError:
            with suppress(OSError):
                os.truncate(self._path, before)
            raise
        self._size = before + len(line)

    def _opened(self) -> io.FileIO:
        file = self._path.open("a+b", buffering=0)
        _end_line(file)
        return file

    def _require_it(self) -> int:
        """Sees to it that the open file is the one that has the name, and gives its size."""
        try:
            own, there = os.fstat(self._file.fileno()), os.stat(self._path)  # noqa: PTH116  no object a record
        except FileNotFoundError:
            return self._open_anew("was removed")
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            return self._open_anew("has a stale handle")
        if (own.st_ino, own.st_dev) != (there.st_ino, there.st_dev):
            return self._open_anew("was replaced by another file")
        if own.st_size < self._size:
            text = "%s was cut from %d bytes to %d: the records in them are lost, and the next ones follow"
            _log.warning(text, self._path, self._size, own.st_size)
            self._size = _end_line(self._file)
            return self._size
        return own.st_size

    def _open_anew(self, why: str) -> int:
        before, new = self._file, self._opened()
        if (token := self._token()) != self._owner:
            new.close()
            taken = "has taken the folder over" if token else "has taken the folder over and ended"
            raise OwnershipLostError(f"{self._path} {why}, and another run {taken}: this process writes nothing there")
        records = 0
        try:
            records = _add_what_lacks(before, new, last_window(self._path))
        except OSError as error:
            _log.warning("%s: what it held before cannot be read (%s)", self._path, error.strerror)
        with suppress(OSError):
            before.close()
        text = "%s %s while the run writes to it: it is opened anew, and has %d records again that it lacked"
        _log.warning(text, self._path, why, records)
        self._file, self._size = new, _end_line(new)
        return self._size

    def _token(self) -> str:
        try:
            holder = read_holder(self._path.parent)
        except (OSError, ValueError):  # nobody can tell
            return getattr(self, "_owner", "")
        return "" if holder is None else holder.token


def _end_line(file: io.FileIO) -> int:
    """Ends the last line of a file where it is not ended, and gives the file's size."""
    size = os.fstat(file.fileno()).st_size
    if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
        size += file.write(b"\n")
    return size


def _add_what_lacks(before: io.FileIO, new: io.FileIO, last: int) -> int:
    """Appends the records of a file past window ``last`` to another; returns how many."""
    records = 0
    with open(before.fileno(), "rb", closefd=False) as lines:
        lines.seek(0)
        for line in lines:
            if last < _place(line)[0] < math.inf:
                new.write(line)
                records += 1
    return records


def last_window(path: Path) -> int:
    """The window of the last whole line of a file; 0 without one."""
    places = (_place(line)[0] for line in reversed(_end(path, math.inf)[1]))
    return next((int(at) for at in places if at < math.inf), 0)


def rewind(
    path: Path,
    window: int,
    *,
    logged: Mapping[str, int] | None = None,
    before_writing: Callable[[], object] = lambda: None,
) -> None:
    """Moves the lines past ``window`` of ``NAME.jsonl`` to ``NAME.superseded.jsonl``, before a run resumes.

    The resumed run repeats those windows, so each is in ``NAME.jsonl`` once, and nothing is lost. Lines that are no
    records, such as one that was cut short or has a damaged byte, go there as well, and the log says so; so it does
    where the records end before ``logged``, window and step of the last one when the checkpoint was saved. Of a long
    file the end is looked at: ``TAIL`` bytes, and more where they begin after ``window``. What ``before_writing``
    raises leaves the file as it was.
    """
    aside = path.with_name(f"{path.stem}.superseded.jsonl")
    kept: list[bytes] = []
    superseded: list[bytes] = []
    damaged: list[int] = []
    last = last_step = 0
    begins, lines = _end(path, window)
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
        _write(path, begins, b"".join(kept))
    if damaged:
        before = lines_of(path, begins)
        text = "%s: line %s is damaged, and was moved as it is to %s"
        _log.warning(text, path, shorten([before + number for number in damaged]), aside.name)
    if logged and last < logged.get("window", 0):
        text = "%s: the records after step %d are lost, up to step %d (window %d)"
        _log.warning(text, path, last_step, logged.get("step", 0), logged["window"])


def lines_of(path: Path, end: int | None = None) -> int:
    """How many lines a file has, or its first ``end`` bytes; 0 without one."""

    def count() -> int:
        with path.open("rb") as file:
            left, found = math.inf if end is None else end, 0
            while left and (block := file.read(int(min(left, 1 << 20)))):
                found += block.count(b"\n")
                left -= len(block)
        return found

    try:
        return retried(count, of=path)
    except ABSENT:
        return 0


def _end(path: Path, window: float) -> tuple[int, list[bytes]]:
    """The last lines of a file, of which the first records are not past ``window``, and where they begin."""

    def read() -> tuple[int, list[bytes]]:
        with path.open("rb") as file:
            size, reach = file.seek(0, os.SEEK_END), TAIL
            while True:
                file.seek(max(0, size - reach - 1))
                if reach < size:
                    file.readline()  # the end of a line; of the one before, where a line begins
                begins = file.tell()
                lines = file.readlines()
                first = next((at for at, _ in map(_place, lines) if at < math.inf), None)
                if reach >= size or (first is not None and first <= window):
                    return (begins if reach < size else 0), lines
                reach *= 4

    try:
        return retried(read, of=path)
    except FileNotFoundError:
        return 0, []


def _write(path: Path, begins: int, end: bytes) -> None:
    """Replaces what a file holds from a place on, in a way that leaves the old file or the new one."""
    if not begins:
        write_bytes(path, end)
        return

    def fill(file: BinaryIO) -> None:
        with path.open("rb") as before:
            shutil.copyfileobj(before, file)
        file.truncate(begins)
        file.seek(begins)
        file.write(end)

    replace_file(path, fill)


def _place(line: bytes) -> tuple[float, int]:
    """The window and the step of a line; an infinite window for a line that is no record."""
    try:
        record = json.loads(line)
        return int(record["window"]), int(record.get("step", 0))
    except (ValueError, RecursionError, KeyError, TypeError, OverflowError):
        return math.inf, 0
