"""What a run ran on: ``environment.json``, which every process that trains in a run directory adds itself to.

A run that goes on says what has changed since its checkpoint was saved.
"""

from __future__ import annotations

import json
import logging
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
from distaccum.checkpoint.store import find
from distaccum.config.engine import ENGINES
from distaccum.distributed.world import World
from distaccum.errors import CheckpointError, shorten
from distaccum.tools.accelerators import accelerators
from distaccum.tools.model_code import code_of, differing
from distaccum.train.components import TrainingComponents
from distaccum.train.run_dir import RunDir

_log = logging.getLogger(__name__)

_MOST_KEPT = 1000  # starts that are kept
_LIBRARIES = ("numpy", "hydra", "omegaconf", "transformers", "datasets", "torchdata", "torchmetrics", "wandb", *ENGINES)
_PROJECTS = {"hydra": "hydra-core"}  # where the project is not called as its module


def note_environment(
    run_dir: RunDir,
    world: World,
    progress: Progress,
    *,
    components: TrainingComponents,
    before: Mapping[str, Any],
    git_commit: str | None,
) -> None:
    """Adds this start to ``environment.json``, and replaces the settings there; rank 0 calls it.

    A run that resumes says what is not as it was when its checkpoint was saved: the code of model and loss, the commit,
    the device, GPUs, libraries. A file that cannot be written is a warning: no training depends on it.

    Args:
        run_dir: of the run.
        world: of the run.
        progress: that the run begins with.
        components: of the run.
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
        "gpus": accelerators()[1],
        "command": run_dir.hidden(" ".join([*sys.argv[:1], *map(shlex.quote, sys.argv[1:])])),
        "git_commit": git_commit,
        "versions": _versions(world.device),
        "code": code_of([*components.model.modules(), components.loss]),
    }
    try:
        starts = _starts(path)
        write_json(path, {"config": dict(components.record), "starts": [*starts[1 - _MOST_KEPT :], start]})
    except OSError as error:
        _log.warning("%s cannot be written: %s. The run goes on without", path, error.strerror)
        return
    resume = components.config.resume
    if progress.step and resume not in ("never", "auto"):  # another run's
        with suppress(OSError, CheckpointError):
            starts = _starts(find(Path(resume)).parent.parent / path.name)
    if progress.step and starts:
        saved_by = [one for one in starts if isinstance(one.get("step"), int) and one["step"] < progress.step]
        _tell_of_changes((saved_by or starts)[-1], start, progress.step)


def _starts(path: Path) -> list[dict[str, Any]]:
    """The starts in a file; none in one that is not there, or damaged."""
    found = []
    with suppress(*ABSENT, ValueError, RecursionError, AttributeError):
        found = json.loads(retried(path.read_bytes, of=path)).get("starts", [])
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def _tell_of_changes(before: Mapping[str, Any], now: Mapping[str, Any], step: int) -> None:
    """Warns of what is not as it was in the start that has saved this step: the code, and what computes."""
    code, versions = ((_texts(before, key), _texts(now, key)) for key in ("code", "versions"))
    commits = [str(one.get("git_commit") or "")[:12] for one in (before, now)]
    commit = f" (commit {commits[0]} -> {commits[1]})" if all(commits) and commits[0] != commits[1] else ""
    if modules := differing(*code):
        text = "since step %d was saved the code of %s has changed%s, which model or loss is made of"
        _log.warning(text, step, shorten(modules), commit)
    elif commit:
        _log.warning("since step %d was saved the code has changed%s, and that of model and loss has not", step, commit)
    pairs = {name: (before.get(name), now.get(name)) for name in ("device", "gpus")}
    pairs |= {name: (versions[0].get(name), versions[1].get(name)) for name in versions[1] if name != "system"}
    other = [f"{name} {was} -> {is_now}" for name, (was, is_now) in pairs.items() if was is not None and was != is_now]
    if other:
        _log.warning("since step %d was saved what computes has changed: %s", step, "; ".join(other))


def _texts(start: Mapping[str, Any], key: str) -> dict[str, str]:
    found = start.get(key)
    return {str(name): str(value) for name, value in found.items()} if isinstance(found, dict) else {}


def _device(device: torch.device) -> str:
    if device.type == "cpu":
        return platform.processor() or platform.machine()
    return str(torch.get_device_module(device).get_device_name(device))


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
