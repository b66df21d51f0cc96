"""What the kernel and the interpreter say of a process: whether it runs, and where its threads stand."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from multiprocessing import active_children
from pathlib import Path
from types import FrameType

DIED = "has died"
_STATES = {
    "T": "is stopped (SIGSTOP, or Ctrl-Z)",
    "t": "is stopped by a debugger",
    "D": "waits for a disk or a network file system (state D)",
    "Z": DIED,
    "X": DIED,
}
_DEBUGGERS = ("pdb.py", "bdb.py", "ipdb", "pydevd", "debugpy", "pudb")


def trouble_of(pid: int) -> str:
    """What is wrong with a process of this machine, such as ``has died``; empty where nobody knows of anything."""
    if sys.platform != "linux":
        return ""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2]
    except FileNotFoundError:
        return DIED
    except OSError:
        return ""
    return _STATES.get(after_name[:1], "")


def troubled_children() -> str:
    """The loading processes of this one with which something is wrong, in words; empty without one."""
    found = [(child.pid, trouble_of(child.pid)) for child in active_children() if child.pid is not None]
    return ", ".join(f"its process {pid} {trouble}" for pid, trouble in found if trouble)


@dataclass(frozen=True, slots=True)
class Stand:
    """Where a thread stands: in whose code, in which collective if it waits in one, and whether a debugger has it."""

    code: str
    collective: str
    debugged: bool


NOWHERE = Stand("", "", debugged=False)


def stand_of(thread: int) -> Stand:
    """Of the thread with this identifier; empty where it has ended, or goes on while it is looked at."""
    try:
        return _walked(sys._current_frames().get(thread))
    except AttributeError:  # a running thread's frames may be reused under the walk
        return NOWHERE


def _walked(frame: FrameType | None) -> Stand:
    code = collective = ""
    debugged = False
    while frame is not None:
        file = frame.f_code.co_filename
        if "/torch/distributed/" in file and not code:
            collective = collective if file.endswith("c10d_logger.py") else frame.f_code.co_name
        elif not code and not is_of_library(file):
            code = _line(frame)
        debugged = debugged or any(name in file for name in _DEBUGGERS)
        frame = frame.f_back
    return Stand(code, collective, debugged)


def is_of_library(file: str) -> bool:
    """Whether a source file is of Python or of an installed package."""
    return "/site-packages/" in file or "/lib/python" in file or file.startswith("<")


def _line(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename)
    return f"{path.parent.name}/{path.name}:{frame.f_lineno} in {frame.f_code.co_name}"
