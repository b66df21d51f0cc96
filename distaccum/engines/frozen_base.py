"""The frozen weights of a model with adapters, which no engine's state holds: they are where they came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from torch import nn

from distaccum.engines.modules import clean

_ATTRIBUTE = "_distaccum_frozen_base"
Value = TypeVar("Value")


@dataclass(frozen=True)
class FrozenBase:
    """The names of parameters, in the model as it was written."""

    names: frozenset[str]


def set_aside(model: nn.Module) -> None:
    """From here on what is frozen of the model, before an engine wraps it, is no part of an engine's state."""
    named = model.named_parameters(remove_duplicate=False)
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    names = frozenset(clean(name) for name, parameter in named if id(parameter) not in trained)
    vars(model)[_ATTRIBUTE] = FrozenBase(names)


def names_of(model: nn.Module) -> frozenset[str]:
    """What was set aside of it; empty for most models."""
    base = vars(model).get(_ATTRIBUTE)
    return base.names if isinstance(base, FrozenBase) else frozenset()


def kept(model: nn.Module, tensors: Mapping[str, Value]) -> dict[str, Value]:
    """Without what was set aside."""
    aside = names_of(model)
    return {name: value for name, value in tensors.items() if name not in aside}
