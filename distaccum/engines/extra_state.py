"""Modules' extra state (``get_extra_state``) as tensors of bytes, so that it goes wherever tensors go.

Its values may be anything that ``torch.load(weights_only=True)`` reads: plain values, tensors, containers of them.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import Tensor, nn

from distaccum.engines.modules import clean
from distaccum.errors import CheckpointError

_SUFFIX = "_extra_state"  # the end of its name in a state dict
_ZIP = b"PK"  # how a file of torch.save begins


def is_extra(name: str) -> bool:
    """Whether a state dict keeps extra state under this name."""
    return name.rpartition(".")[2] == _SUFFIX


def has_extra(module: nn.Module) -> bool:
    """Whether the module itself keeps extra state."""
    return type(module).get_extra_state is not nn.Module.get_extra_state


def takes_extra(module: nn.Module) -> bool:
    """Whether the module itself keeps extra state, and takes it back."""
    return has_extra(module) and type(module).set_extra_state is not nn.Module.set_extra_state


def extra_state(model: nn.Module) -> dict[str, Any]:
    """The extra state of the model's modules, by its names in a state dict; not encoded."""
    modules = model.named_modules(remove_duplicate=False)
    extras = {clean(name): module.get_extra_state() for name, module in modules if has_extra(module)}
    return {f"{name}.{_SUFFIX}".lstrip("."): value for name, value in extras.items()}


def to_bytes(name: str, value: Any) -> Tensor:
    """The value as a 1-dim uint8 tensor on the host.

    Raises:
        CheckpointError: reading it back would execute code.
    """
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
        stream.seek(0)
        torch.load(stream, weights_only=True)
    except (pickle.PickleError, AttributeError, TypeError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        problem = f"{name} cannot be saved ({type(error).__name__}: {reason})"
        raise CheckpointError(f"{problem}: let it be tensors, numbers, texts, and lists and dicts of them") from error
    return torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8)


def from_bytes(value: Tensor) -> Any:
    """What :func:`to_bytes` was given; a tensor that others have saved as it is."""
    content = value.cpu()
    plain = content.dtype is not torch.uint8 or content.ndim != 1 or bytes(content[:2].tolist()) != _ZIP
    return value if plain else torch.load(io.BytesIO(content.numpy().tobytes()), weights_only=True)


def set_extra_state(model: nn.Module, name: str, value: Tensor) -> None:
    """Hands saved extra state to the module that ``name`` belongs to."""
    owner = name.rpartition(".")[0]
    for own_name, module in model.named_modules(remove_duplicate=False):
        if clean(own_name) == owner:
            module.set_extra_state(from_bytes(value))
