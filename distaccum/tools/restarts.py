"""Ends a job that a machine starts again and again, and that fails each time before it gets further."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from distaccum.checkpoint.files import write_json
from distaccum.errors import ConfigError
from distaccum.train.micro_batch import ended_by_memory
from distaccum.train.run_dir import State

_MOST = 3  # starts in a row that fail
_NAME = "restarts.json"


def is_restart(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun, a requeue or a chain of Slurm's has started this process again, and no person."""
    counts = (environment.get(name, "0") for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))
    element, first = (environment.get(f"SLURM_ARRAY_TASK_{name}", "0") for name in ("ID", "MIN"))
    return any(count.isdecimal() and int(count) > 0 for count in counts) or element != first


def job_of_kubernetes(environment: Mapping[str, str] = os.environ) -> str:
    """The job of this pod, by the variable that ``launch/k8s/job.yaml`` sets; empty elsewhere.

    A pod does not know how many came before it. But a job's name is its own: one who applies the manifest again gets
    another, so that a second start of the same job in a folder is the cluster's.
    """
    return environment.get("JOB_ID", "") if "KUBERNETES_SERVICE_HOST" in environment else ""


def note_start(folder: Path, *, restarted: bool | None = None, job: str | None = None) -> None:
    """Notes how the start before has ended, by ``status.json`` in the run directory ``folder``; rank 0 calls it.

    Args:
        folder: of the run.
        restarted: whether a machine has started this process again; by default what the environment says.
        job: of Kubernetes; where the start before was the same job's, a machine has, too. By default as above.

    Raises:
        ConfigError: three starts in a row have failed, and none got further than the one before.
    """
    job = job_of_kubernetes() if job is None else job
    failures = _failures(folder, restarted, job)
    if failures or job:
        _write(folder, job, failures)
    else:
        (folder / _NAME).unlink(missing_ok=True)
    if _is_loop(failures):
        raise _refusal(failures)


def refuse_crash_loop(folder: Path, *, restarted: bool | None = None, job: str | None = None) -> None:
    """As :func:`note_start`, but notes no start: for a check before any process runs."""
    job = job_of_kubernetes() if job is None else job
    failures = _failures(folder, restarted, job)
    if _is_loop(failures):
        _write(folder, job, failures)  # the status of the last one may become that of the refusal
        raise _refusal(failures)


def _write(folder: Path, job: str, failures: list[dict[str, Any]]) -> None:
    write_json(folder / _NAME, {"job": job, "failures": failures[-_MOST:]})


def _is_loop(failures: list[dict[str, Any]]) -> bool:
    steps = [failure["step"] for failure in failures[-_MOST:]]
    return len(steps) == _MOST and max(steps) <= steps[0]


def _refusal(failures: list[dict[str, Any]]) -> ConfigError:
    reason = failures[-1]["reason"] or "it was killed, and left no reason"
    step = failures[-_MOST]["step"]
    problem = f"{_MOST} starts in a row have failed, none after step {step}, the last one so: {reason}"
    remedy = (
        "Mend that: resume from an older checkpoint if the data or weights of that step are the cause, lower "
        "batch.micro_size if memory is. Started again by hand, as a new job, it counts from zero"
    )
    return ConfigError("resume", None, problem, remedy)


def _failures(folder: Path, restarted: bool | None, job: str) -> list[dict[str, Any]]:
    """Those of the starts before in a row, the last one's included; a run that saved and left begins a new row."""
    before: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        found = json.loads((folder / _NAME).read_bytes())
        before = found if isinstance(found, dict) else {}
    restarted = is_restart() if restarted is None else restarted
    if not restarted and not (job and before.get("job") == job):
        return []
    failures: list[dict[str, Any]] = []
    with suppress(KeyError, TypeError):
        failures = list(before["failures"])
    with suppress(OSError, ValueError, KeyError, TypeError):
        status = json.loads((folder / "status.json").read_bytes())
        if status["state"] in (State.DONE.value, State.PREEMPTED.value):
            return []
        if status["state"] == State.FAILED.value and ended_by_memory(folder):
            return failures  # this one cuts what did not fit
        if status["state"] in (State.FAILED.value, State.RUNNING.value):
            failures.append({"step": int(status["step"]), "reason": str(status["reason"])})
    return failures
