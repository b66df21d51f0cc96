"""File operations that fail with a chosen error, or kill the process: ``failing_io.c``, loaded before the C library.

A test builds the library and starts a program with ``LD_PRELOAD``; the program arms it. What is planted is what the
kernel would answer, so that Python's files, torch's and safetensors' all meet it.
"""

import ctypes
import errno
import os
import shutil
import subprocess
from enum import IntFlag
from pathlib import Path

import pytest

from distaccum.accumulation.step import Outcome
from distaccum.train.callbacks import Callback, Run

SOURCE = Path(__file__).with_suffix(".c")
KILL = -9
ALWAYS = 2**40
_STEP = 3


class Operation(IntFlag):
    """As in the C source."""

    READ_OPEN = 1
    READ = 2
    LIST = 4
    STAT = 8
    WRITE_OPEN = 16
    WRITE = 32
    SYNC = 64
    CHANGE = 128


READS = (Operation.READ_OPEN, Operation.READ, Operation.LIST, Operation.STAT)
WRITES = Operation.WRITE_OPEN | Operation.WRITE | Operation.SYNC | Operation.CHANGE


def build(folder: Path) -> Path:
    """Compiles the library into ``folder``; skips the test where there is no compiler."""
    if shutil.which("gcc") is None:
        if "DISTACCUM_REQUIRE_TOOLS" in os.environ:
            pytest.fail("gcc is missing")
        pytest.skip("gcc is missing")
    library = folder / "failing_io.so"
    command = ["gcc", "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl"]
    subprocess.run(command, check=True)
    return library


def arm(path: str | Path, operations: int, error: int, *, at: int = 1, times: int = 1) -> None:
    """Operations on paths that contain ``path`` fail with ``error``, from number ``at`` on and so often."""
    longs = (ctypes.c_long(at), ctypes.c_long(times))
    ctypes.CDLL(None).failing_io_arm(str(path).encode(), int(operations), error, *longs)


def disarm() -> int:
    """Lets everything through; returns how many operations there were."""
    count = ctypes.CDLL(None).failing_io_disarm
    count.restype = ctypes.c_long
    return int(count())


class FailsToWrite(Callback):
    """After the third update, or ``SINCE``, writes to paths with ``WHERE`` meet a full disk, on rank ``WHO``."""

    def on_update(self, run: Run, outcome: Outcome) -> None:
        if run.progress.step == int(os.environ.get("SINCE", _STEP)) and os.environ.get("RANK", "0") == os.environ.get(
            "WHO"
        ):
            arm(os.environ["WHERE"], Operation.WRITE_OPEN | Operation.WRITE, errno.ENOSPC, times=ALWAYS)
