"""Copies weights from files into a model that no engine has wrapped yet."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from distaccum.checkpoint.tensors import TensorFiles
from distaccum.errors import CheckpointError, ConfigError, near_misses, shorten


def check(model: nn.Module, path: Path, *, key: str = "init_from") -> None:
    """Raises ConfigError for ``key`` unless the file, or the folder's model, has the model's tensors and no others."""
    try:
        files = TensorFiles(path)
    except CheckpointError as error:
        remedy = "Name a safetensors file, a checkpoint, or a folder with model.safetensors"
        raise ConfigError(key, path, str(error), remedy) from error
    own = _tensors_of(model)
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
    for name, tensor in _tensors_of(model).items():
        tensor.copy_(files[name])


def is_meta(model: nn.Module) -> bool:
    """Whether the model has no memory yet, which its engine then allocates."""
    return any(parameter.is_meta for parameter in model.parameters())


def _tensors_of(model: nn.Module) -> Mapping[str, Tensor]:
    # Imported here: it takes a second, and a run that starts from zero needs none of it.
    from torch.distributed.checkpoint.state_dict import get_model_state_dict  # noqa: PLC0415

    found: Any = get_model_state_dict(model)
    return cast(Mapping[str, Tensor], found)
