"""DeepSpeed's own checkpoint, inside the verified folder of an older distaccum; it is read, and written no more."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from distaccum.engines.deepspeed.compat import suppress_output
from distaccum.errors import CheckpointError

_FOLDER, _TAG, _ABOUT = "deepspeed", "state", "distaccum.json"
_LONGEST = 200  # characters
# What DeepSpeed itself puts into its files beside tensors and plain values: none of them runs code.
_CLASSES = (
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.utils.tensor_fragment.fragment_address",
)


def are_in(folder: Path) -> bool:
    """Whether an older distaccum has saved them there."""
    return (folder / _FOLDER / _ABOUT).exists()


def load(engine: Any, folder: Path, about: Mapping[str, Any]) -> None:
    """Restores what an older distaccum saved, bit by bit; learning rates and the like stay this run's. A collective.

    DeepSpeed unpickles its files without restriction. So they are first read with torch's ``weights_only``, which runs
    no code, by memory map: they hold nothing but tensors, plain values and a few of DeepSpeed's own classes.

    Raises:
        CheckpointError: they are missing, are those of another world size, stage or precision, or hold something else.
    """
    source = folder / _FOLDER
    if not (source / _ABOUT).exists():
        raise CheckpointError(f"{source} is not there: the checkpoint is not one of engine=deepspeed")
    saved = json.loads((source / _ABOUT).read_text())
    differing = ", ".join(f"{key} {saved[key]} (now {own})" for key, own in about.items() if saved[key] != own)
    if differing:
        remedy = "resume so, or export the weights and start from them"
        raise CheckpointError(f"{source} was saved with {differing}, and DeepSpeed's files fit that alone: {remedy}")
    check_inert(source)
    groups = engine.optimizer.param_groups
    settings = [{name: value for name, value in group.items() if name != "params"} for group in groups]
    with suppress_output():
        path, _ = engine.load_checkpoint(str(source), tag=_TAG, load_lr_scheduler_states=False)
    if path is None:
        raise CheckpointError(f"DeepSpeed found no checkpoint in {source}")
    for group, setting in zip(engine.optimizer.param_groups, settings, strict=True):
        group.update(setting)


def check_inert(folder: Path) -> None:
    """Raises CheckpointError if one of DeepSpeed's files would run code where it is unpickled."""
    allowed: list[Any] = []
    for name in _CLASSES:  # what an older or newer DeepSpeed lacks, its files do not hold
        module, _, attribute = name.rpartition(".")
        with suppress(ImportError, AttributeError):
            allowed.append(getattr(import_module(module), attribute))
    for file in sorted(folder.rglob("*.pt")):
        try:
            with torch.serialization.safe_globals(allowed):
                torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except (pickle.UnpicklingError, RuntimeError) as error:
            line = next((line for line in str(error).splitlines() if "GLOBAL" in line or "class" in line), str(error))
            problem = f"{file} holds more than tensors and plain values ({line.strip()[:_LONGEST]})"
            raise CheckpointError(f"cannot load: {problem}. Start from the weights alone: init_from") from error
