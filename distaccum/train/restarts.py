"""Ends a job that is started again and again by a machine and fails each time before it gets further."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from distaccum.checkpoint.files import write_json
from distaccum.errors import ConfigError
from distaccum.train.run_dir import State

_MOST = 3  # starts in a row that fail
_NAME = "restarts.json"


def is_restart(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun, a requeue or a chain of Slurm's has started this process again, and no person."""
    counts = (environment.get(name, "0") for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))
    element, first = (environment.get(f"SLURM_ARRAY_TASK_{name}", "0") for name in ("ID", "MIN"))
    return any(count.isdecimal() and int(count) > 0 for count in counts) or element != first


def note_start(folder: Path, *, restarted: bool) -> None:
    """Notes how the start before has ended, by ``status.json`` in the run directory ``folder``; rank 0 calls it.

    Raises:
        ConfigError: three starts in a row have failed, and none got further than the one before.
    """
    record = folder / _NAME
    if not restarted:
        record.unlink(missing_ok=True)
        return
    last = _last_failure(folder)  # first: where the run has saved and left, no failure before it counts
    failures = [*_failures(record), *last]
    if not failures:
        record.unlink(missing_ok=True)
        return
    write_json(record, {"failures": failures[-_MOST:]})
    steps = [failure["step"] for failure in failures[-_MOST:]]
    if len(steps) < _MOST or max(steps) > steps[0]:
        return
    reason = failures[-1]["reason"] or "it was killed, and left no reason"
    problem = f"{_MOST} starts in a row have failed, none after step {steps[0]}, the last one so: {reason}"
    remedy = (
        "Mend that: resume from an older checkpoint if the data or weights of that step are the cause, lower "
        "batch.micro_size if memory is. Started again by hand, as a new job, it counts from zero"
    )
    raise ConfigError("resume", None, problem, remedy)


def _failures(record: Path) -> list[dict[str, Any]]:
    with suppress(OSError, ValueError, KeyError, TypeError):
        return list(json.loads(record.read_text())["failures"])
    return []


def _last_failure(folder: Path) -> list[dict[str, Any]]:
    """The start before, if it failed or was killed while it ran; a run that saved and left has not failed."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        status = json.loads((folder / "status.json").read_text())
        if status["state"] in (State.FAILED.value, State.RUNNING.value):
            return [{"step": int(status["step"]), "reason": str(status["reason"])}]
        (folder / _NAME).unlink(missing_ok=True)
    return []
