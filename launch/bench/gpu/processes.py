"""A question to a fresh process: with a limit, and nothing of it left when it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch import python_path

WORKER = "launch.bench.gpu.worker"
# No measurement asks a network: what would is told so, and fails at once instead of waiting.
OFFLINE = {"WANDB_MODE": "disabled", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TOLD = 2000  # characters


@dataclass(frozen=True)
class Answer:
    """What a process gave; ``error`` is empty where it gave all that was asked, else ``said`` ends its output."""

    content: Mapping[str, Any]
    error: str = ""
    said: str = ""


def ask(question: Mapping[str, Any], file: Path, *, log: Path, limit_s: float) -> Answer:
    """The worker's answer to ``question``, which it writes to ``file``; its output goes to ``log``.

    After ``limit_s`` seconds it is killed, with every process of its group.
    """
    asked = file.with_suffix(".asked")
    asked.write_text(json.dumps(question))
    environment = {name: value for name, value in os.environ.items() if name not in _LAUNCHER} | OFFLINE | python_path()
    start = [sys.executable, "-m", WORKER, str(asked), str(file)]
    with log.open("w") as out:
        process = subprocess.Popen(  # noqa: S603  this interpreter
            start, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return Answer({}, f"did not end within {limit_s:.0f} s, and was killed", _last_of(log))
        finally:  # of what it has started, too
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError):
        ended = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return Answer({}, f"{ended} and no answer", _last_of(log))
    error = content.pop("error", "")
    return Answer(content, error, _last_of(log) if error else "")


def _last_of(log: Path) -> str:
    return log.read_text(errors="replace").strip()[-_TOLD:]
