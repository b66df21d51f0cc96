"""What a run ran on: ``environment.json``, which every process that trains in a run directory adds itself to."""

from __future__ import annotations

import json
import logging
import os
import platform
import shlex
import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import distaccum
from distaccum.accumulation.progress import Progress
from distaccum.checkpoint.files import ABSENT, retried, write_json
from distaccum.config.engine import ENGINES
from distaccum.distributed.world import World
from distaccum.errors import ConfigError
from distaccum.train.micro_batch import ended_by_memory
from distaccum.train.run_dir import RunDir, State

# Ends a job that is started again and again by a machine and fails each time before it gets further.

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


def note_start(folder: Path, *, restarted: bool, job: str = "") -> None:
    """Notes how the start before has ended, by ``status.json`` in the run directory ``folder``; rank 0 calls it.

    Args:
        folder: of the run.
        restarted: whether a machine has started this process again.
        job: of Kubernetes; where the start before was the same job's, a machine has, too.

    Raises:
        ConfigError: three starts in a row have failed, and none got further than the one before.
    """
    failures = _failures(folder, restarted, job)
    if failures or job:
        _write(folder, job, failures)
    else:
        (folder / _NAME).unlink(missing_ok=True)
    if _is_loop(failures):
        raise _refusal(failures)


def refuse_crash_loop(folder: Path, *, restarted: bool, job: str = "") -> None:
    """As :func:`note_start`, but notes no start: for a check before any process runs."""
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


def _failures(folder: Path, restarted: bool, job: str) -> list[dict[str, Any]]:
    """Those of the starts before in a row, the last one's included; a run that saved and left begins a new row."""
    before: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        found = json.loads((folder / _NAME).read_bytes())
        before = found if isinstance(found, dict) else {}
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


_log = logging.getLogger(__name__)

_MOST_KEPT = 1000  # starts that are kept
_LIBRARIES = ("numpy", "hydra", "omegaconf", "transformers", "datasets", "torchdata", "torchmetrics", "wandb", *ENGINES)
_PROJECTS = {"hydra": "hydra-core"}  # where the project is not called as its module


def note_environment(
    run_dir: RunDir,
    world: World,
    progress: Progress,
    *,
    config: Mapping[str, Any],
    before: Mapping[str, Any],
    git_commit: str | None,
) -> None:
    """Adds this start to ``environment.json``, and replaces the settings there; rank 0 calls it.

    A file that cannot be written is a warning: no training depends on it.

    Args:
        run_dir: of the run.
        world: of the run.
        progress: that the run begins with.
        config: the settings, without secrets.
        before: the status that the process before left; empty without one.
        git_commit: of the folder that the run was started from.
    """
    path = run_dir.path / "environment.json"
    start = {
        "at": f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S %z}",
        "step": progress.step,
        "window": progress.window,
        "before": dict(before) or None,
        "ranks": world.size,
        "host": platform.node(),
        "device": _device(world.device),
        "command": run_dir.hidden(" ".join([*sys.argv[:1], *map(shlex.quote, sys.argv[1:])])),
        "git_commit": git_commit,
        "versions": _versions(world.device),
    }
    try:
        starts = []
        with suppress(*ABSENT, ValueError, RecursionError):  # one that is damaged begins anew
            found = json.loads(retried(path.read_bytes, of=path)).get("starts", [])
            starts = found if isinstance(found, list) else []
        write_json(path, {"config": dict(config), "starts": [*starts[1 - _MOST_KEPT :], start]})
    except OSError as error:
        _log.warning("%s cannot be written: %s. The run goes on without", path, error.strerror)


def _device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()


def _versions(device: torch.device) -> dict[str, str]:
    """Of what computes, and of the libraries that are loaded; an engine that is one has its name."""
    found = {
        "distaccum": distaccum.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "torch": torch.__version__,
    }
    if device.type == "cuda":
        found["cuda"] = str(torch.version.cuda)
        if torch.distributed.is_nccl_available():
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    for name in _LIBRARIES:
        if name in sys.modules:
            with suppress(PackageNotFoundError):
                found[name] = version(_PROJECTS.get(name, name))
    return found
