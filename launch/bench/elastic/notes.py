"""What the processes of a run note while it lasts, in files that outlive each of them.

Each note is one ``write`` to a file that is opened for appending: notes of several processes do not mix, and a process
that is killed leaves whole ones. Times are those of ``time.monotonic``, one clock for all processes of a machine.
"""

from __future__ import annotations

import json
import os
import struct
from functools import cache
from pathlib import Path
from time import monotonic
from typing import NamedTuple
from zlib import crc32

UNIT = struct.Struct("=dqq")


class Step(NamedTuple):
    """A finished window, as rank 0 of the ranks that have finished it notes it."""

    time: float
    pid: int
    step: int
    ranks: int


class Unit(NamedTuple):
    """A micro-batch that is about to be computed; ``content`` is the same whenever and wherever that is."""

    time: float
    pid: int
    content: int


@cache
def _descriptor(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def note_step(folder: Path, step: int, ranks: int) -> None:
    """Notes a finished window."""
    note = Step(monotonic(), os.getpid(), step, ranks)
    os.write(_descriptor(folder / "steps"), json.dumps(note).encode() + b"\n")


def note_unit(folder: Path, content: bytes) -> None:
    """Notes a micro-batch, before its forward."""
    os.write(_descriptor(folder / "units"), UNIT.pack(monotonic(), os.getpid(), crc32(content)))


def steps_of(folder: Path) -> list[Step]:
    """The windows that were finished so far."""
    path = folder / "steps"
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [Step(*json.loads(line)) for line in lines]


def units_of(folder: Path) -> list[Unit]:
    """The micro-batches that were begun so far."""
    content = (folder / "units").read_bytes()
    return [Unit(*values) for values in UNIT.iter_unpack(content[: len(content) // UNIT.size * UNIT.size])]
