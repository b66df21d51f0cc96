"""DeepSpeed's own checkpoint, inside distaccum's verified folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distaccum.distributed.world import World
from distaccum.engines.deepspeed.compat import suppress_output
from distaccum.errors import CheckpointError

_FOLDER, _TAG, _ABOUT = "deepspeed", "state", "distaccum.json"


def save(engine: Any, folder: Path, about: Mapping[str, Any], world: World) -> None:
    """Writes DeepSpeed's files and ``about``, the run that they fit, into the folder ``deepspeed``; a collective."""
    target = folder / _FOLDER
    with suppress_output():
        engine.save_checkpoint(str(target), tag=_TAG, save_latest=False)
    if world.is_main:
        (target / _ABOUT).write_text(json.dumps(about))
    world.barrier()


def load(engine: Any, folder: Path, about: Mapping[str, Any]) -> None:
    """Restores :func:`save`, bit by bit; learning rates and other settings stay this run's. A collective.

    DeepSpeed unpickles its files: whoever wrote them can run code. The manifest of the checkpoint's folder proves that
    the files are those that were saved; it does not say by whom.

    Raises:
        CheckpointError: they are missing, or are those of another world size, stage or precision.
    """
    source = folder / _FOLDER
    if not (source / _ABOUT).exists():
        raise CheckpointError(f"{source} is not there: the checkpoint is not one of engine=deepspeed")
    saved = json.loads((source / _ABOUT).read_text())
    differing = ", ".join(f"{key} {saved[key]} (now {own})" for key, own in about.items() if saved[key] != own)
    if differing:
        remedy = "resume so, or export the weights and start from them"
        raise CheckpointError(f"{source} was saved with {differing}, and DeepSpeed's files fit that alone: {remedy}")
    groups = engine.optimizer.param_groups
    settings = [{name: value for name, value in group.items() if name != "params"} for group in groups]
    with suppress_output():
        path, _ = engine.load_checkpoint(str(source), tag=_TAG, load_lr_scheduler_states=False)
    if path is None:
        raise CheckpointError(f"DeepSpeed found no checkpoint in {source}")
    for group, setting in zip(engine.optimizer.param_groups, settings, strict=True):
        group.update(setting)
