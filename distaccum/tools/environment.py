"""What a run ran on: ``environment.json``, which every process that trains in a run directory adds itself to."""

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
from typing import Any

import torch

import distaccum
from distaccum.accumulation.progress import Progress
from distaccum.checkpoint.files import ABSENT, retried, write_json
from distaccum.config.engine import ENGINES
from distaccum.distributed.world import World
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
