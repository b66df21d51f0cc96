"""What is told of a failure: the reason in the status, a few lines on the screen, the traceback in its log."""

from __future__ import annotations

import errno
import json
import os
import re
import traceback
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from time import time

from distaccum.distributed.watchdog import is_of_library
from distaccum.errors import GONE, DistaccumError, PeerError, SpikeError
from distaccum.train.run_dir import RunDir

# Errors in words: another rank that has gone, and where this one was.

# How the libraries that join the ranks say that another one is gone: gloo, NCCL, torch's store.
_LOST = re.compile(
    r"connection (closed|reset|refused|was)|closed by (remote )?peer|reset by peer|broken pipe|socket closed|gloo|nccl|"
    r"timed? ?out|remote process exited|failed to (recv|send)|EnforceNotMet",
    re.IGNORECASE,
)


def is_lost_connection(error: BaseException) -> bool:
    """Whether a collective has failed, as it does when another rank is gone."""
    if isinstance(error, DistaccumError):  # whose words may name the group's timeout
        return False
    return isinstance(error, RuntimeError | OSError) and _LOST.search(str(error)) is not None


def innermost(error: BaseException) -> str:
    """Where an error comes from, in code that is not a library's."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not is_of_library(frame.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else "an unknown line"


RUN_NOTE = "DISTACCUM_RUN_NOTE"
"""Names the file for the run directory, written by rank 0. Its launcher, which reads it, then prints a failure."""


def follows_from_another_rank(error: BaseException) -> bool:
    """Whether the error may be what is left of a collective when another rank has gone."""
    if isinstance(error, PeerError):
        return error.reason == GONE  # else that rank has said why
    return is_lost_connection(error)


def reason_of(rank: int, error: BaseException) -> str:
    """``rank N: Type: message``; another rank's reason where the error follows from it."""
    if isinstance(error, PeerError):
        return error.reason
    if isinstance(error, SystemExit):
        return f"rank {rank}: the program called sys.exit({error.code!r}) in the middle of the run"
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return f"rank {rank}: {type(error).__name__}: {error}{'. Make room there, and go on' if full else ''}"


def note_failure(run_dir: RunDir, rank: int, error: BaseException) -> None:
    """Writes the reason into the run's status and the traceback into ``logs/rank-N.log``; never raises."""
    run_dir.write_failure(reason_of(rank, error))
    if not run_dir.is_foreign():
        with suppress(OSError):  # a full disk: the status has its own reserve
            run_dir.logs.mkdir(exist_ok=True)
            with (run_dir.logs / f"rank-{rank}.log").open("a") as file:
                file.write(f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S %z}\n")
                file.write(run_dir.hidden("".join(traceback.format_exception(error))))


def tell_torchrun(reason: str, run_dir: RunDir) -> None:
    """Writes torchrun's error file, if it asked for one: its report then has the cause, and no traceback."""
    name = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if name:
        more = f"; more in {run_dir.logs}" if run_dir.logs.is_dir() else ""
        told = {"py_callstack": reason + more, "timestamp": str(int(time()))}
        with suppress(OSError):
            Path(name).write_text(json.dumps({"message": {"message": reason, "extraInfo": told}}))


def lines_of(run_dir: RunDir, own: str = "") -> list[str]:
    """The failure for people: cause and rank, step, what is saved, the command that goes on, where more is.

    Args:
        run_dir: of the run.
        own: the reason of this rank, where nothing could be written.
    """
    status, saved = run_dir.status(), run_dir.saved_step()
    cause = run_dir.failure() or own or str(status.get("reason") or "unknown")
    kept = "no checkpoint was saved" if saved is None else f"step {saved} is saved in {run_dir.checkpoints}"
    lines = [f"the run failed: {_short(cause)}", f"last logged step: {status.get('step', 0)}; {kept}"]
    if saved is not None and f": {SpikeError.__name__}: " not in cause:  # which says another way on
        lines.append(f"to go on: the same command with resume=auto hydra.run.dir={run_dir.path}")
    logs = sorted(run_dir.logs.glob("rank-*.log")) if run_dir.logs.is_dir() else []
    if logs:
        ranks = "1 rank" if len(logs) == 1 else f"{len(logs)} ranks"
        lines.append(f"logs and tracebacks: {run_dir.logs}/rank-N.log (of {ranks})")
    return lines


def _short(text: str, most: int = 12) -> str:
    lines = text.splitlines()
    left = len(lines) - most
    return "\n".join([*lines[:most], *([f"... {left} more lines"] if left > 0 else [])])
