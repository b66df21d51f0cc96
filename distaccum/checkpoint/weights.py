"""Copies weights from files into a model that no engine has wrapped yet."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from distaccum.checkpoint.tensors import TensorFiles
from distaccum.engines.state import model_state
from distaccum.errors import CheckpointError, ConfigError, near_misses, shorten


def check(model: nn.Module, path: Path, *, key: str = "init_from") -> None:
    """Raises ConfigError for ``key`` unless the file, or the folder's model, has the model's tensors and no others."""
    try:
        files = TensorFiles(path)
    except CheckpointError as error:
        remedy = "Name a safetensors file, a checkpoint, or a folder with model.safetensors"
        raise ConfigError(key, path, str(error), remedy) from error
    own = model_state(model)
    missing = [name for name in own if name not in files]
    if missing:
        problem = f"has no {shorten(missing, most=1)}{near_misses(missing[0], files)}"
        raise ConfigError(key, path, problem, f"Use weights of this {type(model).__name__}")
    unknown = [name for name in files if name not in own]
    if unknown:
        problem = f"has {shorten(unknown, most=1)}, which the model has not"
        raise ConfigError(key, path, problem, f"Use weights of this {type(model).__name__}")
    for name, tensor in own.items():
        if files.shape(name) != tuple(tensor.shape):
            problem = f"has {name} of shape {list(files.shape(name))}, and the model of {list(tensor.shape)}"
            raise ConfigError(key, path, problem, "Give the model the sizes that it was trained with")


@torch.no_grad()
def fill(model: nn.Module, path: Path) -> None:
    """Overwrites every parameter and buffer; one tensor is read at a time."""
    files = TensorFiles(path)
    for name, tensor in model_state(model).items():
        tensor.copy_(files[name])
