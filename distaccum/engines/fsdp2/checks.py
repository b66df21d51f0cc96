"""What FSDP2 cannot shard of a model, found before there is a process group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from distaccum.engines.fsdp2.wrap import blocks_of, is_meta
from distaccum.errors import ConfigError, near_misses

_NAMED = 4  # modules that a glob which matches none is answered with
_REMEDY = "Use engine=zero1, or change the model"


def check_meta(model: nn.Module, *, meta_init: bool) -> None:
    """Raises ConfigError where weights are to be made by the engine, and are there already."""
    if meta_init and not is_meta(model):
        problem = f"this {type(model).__name__} has its weights already"
        raise ConfigError("engine.meta_init", True, problem, "Build it under torch.device('meta'), or leave it out")


def check_globs(model: nn.Module, globs: Sequence[str]) -> None:
    """Raises ConfigError where a glob matches no module, and none is spelled nearly so (that, ``blocks_of`` says)."""
    names = [name for name, _ in model.named_modules() if name]
    for glob in globs:
        if not any(fnmatchcase(name, glob) for name in ["", *names]) and not near_misses(glob, names):
            shown = ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
            problem = f"matches no module of {type(model).__name__}, which has {shown or 'none'}"
            raise ConfigError("engine.blocks", glob, problem, "Use names as of model.named_modules()")


def check_parameters(model: nn.Module, globs: Sequence[str]) -> None:
    """Raises ConfigError for a parameter that ``fully_shard`` cannot take, or would take in two parts."""
    names = {id(p): name for name, p in model.named_parameters()}
    for parameter in model.parameters():
        fault = _fault(parameter)
        if fault:
            raise _refusal(f"{names[id(parameter)]} {fault}")
    blocks = blocks_of(model, globs)
    units = [*(block for block in blocks if block is not model), model]
    homes: dict[int, nn.Module] = {}
    for unit in units:
        dtypes: dict[torch.dtype, str] = {}
        for parameter in _own(unit, set(units)):
            name = names[id(parameter)]
            if homes.setdefault(id(parameter), unit) is not unit:
                raise _refusal(f"{name} is shared by two blocks, or by a block and what is in none")
            if parameter.requires_grad:
                dtypes.setdefault(parameter.dtype, name)
        if len(dtypes) > 1:
            mixed = " and ".join(f"{name} in {str(d).removeprefix('torch.')}" for d, name in dtypes.items())
            raise _refusal(f"one block holds {mixed}")


def _fault(parameter: nn.Parameter) -> str:
    if parameter.dim() == 0:
        return "has no dimension to cut"
    if parameter.numel() == 0:
        return "has no elements"
    return "" if parameter.is_contiguous() else "is not contiguous in memory"


def _own(unit: nn.Module, units: set[nn.Module]) -> Iterator[nn.Parameter]:
    """Its parameters, but for those of units inside it."""
    yield from unit.parameters(recurse=False)
    for child in unit.children():
        if child not in units:
            yield from _own(child, units)


def _refusal(problem: str) -> ConfigError:
    return ConfigError("engine", "fsdp2", f"cannot shard this model: {problem}", _REMEDY)
