"""Optimizer state by the names of parameters: ``state.NAME.KEY``, whichever optimizer, rank or shard holds it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from distaccum.engines.modules import full_tensor, is_sharded, shard_like, tensors_in
from distaccum.engines.state import from_bytes, to_bytes
from distaccum.errors import CheckpointError, MisuseError, shorten

_log = logging.getLogger(__name__)
_PREFIX, _OWN = "state.", "own."
_KIND = "kind."  # of an optimizer: its class
_AS_BYTES = "in bytes"  # the value of what is neither a tensor nor a plain value, next to its bytes


def collect(
    optimizers: Iterable[Optimizer], parameters: Mapping[str, nn.Parameter], *, owns: Callable[[int], bool]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and plain values that this rank's optimizers keep; a collective where parameters are sharded.

    Args:
        optimizers: over disjoint sets of the parameters.
        parameters: by name, in the same order on every rank.
        owns: whether this rank gives the n-th parameter's state, of those it holds a part of.

    Lists and dicts of whole tensors and plain values are kept as bytes, and so is a whole tensor of a sharded parameter
    that has another shape: a load cuts what is not.

    Raises:
        MisuseError: an optimizer keeps something that cannot be read without code, or lists of shards.
    """
    optimizers = list(optimizers)
    kept = {id(p): entries for optimizer in optimizers for p, entries in optimizer.state.items()}
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {**kinds(optimizers)}
    for i, optimizer in enumerate(optimizers):
        for key, value in optimizer.state.items():
            if isinstance(key, Tensor):
                continue
            if not isinstance(key, str) or not isinstance(value, bool | int | float | str | None):
                problem = f"{type(optimizer).__name__} keeps a {type(value).__name__} of no parameter ({key!r})"
                raise MisuseError(f"{problem}: of the whole optimizer only numbers and texts are saved")
            values[f"{_OWN}{i}.{key}"] = value
    for n, (name, parameter) in enumerate(parameters.items()):
        for key, value in kept.get(id(parameter), {}).items():
            if not isinstance(value, Tensor | bool | int | float | str | None) or _is_whole(value, parameter):
                if owns(n):
                    tensors[f"{_PREFIX}{name}.{key}"] = _encoded(name, key, value)
                    values[f"{_PREFIX}{name}.{key}"] = _AS_BYTES
            elif isinstance(value, Tensor):
                full = full_tensor(value)
                if owns(n):
                    tensors[f"{_PREFIX}{name}.{key}"] = full.cpu() if is_sharded(value) else full
            elif owns(n):
                values[f"{_PREFIX}{name}.{key}"] = value
    return tensors, values


def by_entry(
    optimizers: Iterable[Optimizer], parameters: Mapping[str, Tensor], *, others: bool = True
) -> dict[str, Tensor]:
    """Tensors and numbers that this rank's optimizers keep, as ``exp_avg of NAME``; shards where they are sharded.

    Of what is none of the ``parameters`` too, unless ``others`` is false.
    """
    names = {id(parameter): name for name, parameter in parameters.items()}
    found: dict[str, Tensor] = {}
    for number, optimizer in enumerate(optimizers):
        for place, (parameter, entries) in enumerate(optimizer.state.items()):
            if not isinstance(parameter, Tensor) or not (others or id(parameter) in names):
                continue
            name = names.get(id(parameter), f"tensor {place} of optimizer {number}")
            for key, value in entries.items():
                if isinstance(value, Tensor):
                    found[f"{key} of {name}"] = value
                elif isinstance(value, bool | int | float):
                    found[f"{key} of {name}"] = torch.tensor(float(value), dtype=torch.float64)
    return found


def load(
    optimizers: Iterable[Optimizer],
    parameters: Mapping[str, nn.Parameter],
    tensors: Mapping[str, Tensor],
    values: Mapping[str, Any],
    *,
    model: Mapping[str, Tensor] = MappingProxyType({}),
) -> None:
    """Restores what was kept of each optimizer's parameters, and of the optimizer itself.

    A parameter that the saved run had never used has no state, and starts without; the state of one that is in the
    ``model`` and is frozen now is left out, and a warning names it. What was kept in another type than
    its parameter, such as weights in twice the precision, keeps that type, where ``model`` says that the parameter had
    its present one.

    Raises:
        MisuseError: it is the state of optimizers of other classes.
        KeyError: something was kept of a parameter that the model has not.
        ValueError: a tensor has another shape than its sharded parameter.
    """
    optimizers = list(optimizers)
    check_kinds(optimizers, values)
    kept, own = by_owner(tensors, values)
    leave_out_frozen(kept, parameters, model)
    names = {id(parameter): name for name, parameter in parameters.items()}
    for number, optimizer in enumerate(optimizers):
        held = [p for group in optimizer.param_groups for p in group["params"]]
        state: dict[Any, Any] = {
            i: {key: _read(tensors, values, parameter, full) for key, full in kept[names[id(parameter)]].items()}
            for i, parameter in enumerate(held)
            if names.get(id(parameter)) in kept
        }
        # Torch moves each entry to where, and as what, this run's settings want it.
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": state | own.get(number, {}), "param_groups": groups})
        for i, entries in state.items():
            for key, value in entries.items():
                name, changed = names[id(held[i])], _types(optimizer.state[held[i]][key]) != _types(value)
                if changed and name in model and model[name].dtype == held[i].dtype:  # only then it is read
                    optimizer.state[held[i]][key] = _moved(value, held[i].device)


def leave_out_frozen(kept: dict[str, dict[str, str]], trained: Iterable[str], model: Iterable[str]) -> None:
    """Takes out of ``kept`` what was kept of parameters that are not ``trained`` any more.

    Raises:
        KeyError: something was kept of what is no parameter of the ``model`` either.
    """
    unknown = kept.keys() - set(trained)
    if strangers := sorted(unknown - set(model)):
        raise KeyError(f"optimizer state of {strangers[0]!r}, which is no trained parameter of the model")
    for name in unknown:
        del kept[name]
    if unknown:
        _log.warning("frozen since, and resumed without optimizer state: %s", shorten(sorted(unknown)))


def kinds(optimizers: Iterable[Optimizer]) -> dict[str, str]:
    """Of each optimizer its class, as values to keep."""
    return {f"{_KIND}{i}": type(optimizer).__name__ for i, optimizer in enumerate(optimizers)}


def check_kinds(optimizers: Iterable[Optimizer], values: Mapping[str, Any]) -> None:
    """Raises MisuseError where the state is that of optimizers of other classes."""
    before = [str(value) for name, value in sorted(values.items()) if name.startswith(_KIND)]
    now = list(kinds(optimizers).values())
    if before and before != now:
        problem = f"the state is that of {', '.join(before)}, and it would be loaded into {', '.join(now)}"
        raise MisuseError(f"{problem}: continue with the same optimizers, or load the model's weights alone")


def entry(name: str, key: str) -> str:
    """What the state ``key`` of the parameter ``name`` is called."""
    return f"{_PREFIX}{name}.{key}"


def by_owner(
    tensors: Mapping[str, Tensor], values: Mapping[str, Any]
) -> tuple[dict[str, dict[str, str]], dict[int, dict[Any, Any]]]:
    """By parameter: by key: the whole name of what was kept; by optimizer: what belongs to none of its parameters."""
    kept: dict[str, dict[str, str]] = {}
    own: dict[int, dict[Any, Any]] = {}
    for full_name, value in values.items():
        if full_name.startswith(_OWN):
            n, key = full_name.removeprefix(_OWN).split(".", 1)
            own.setdefault(int(n), {})[key] = value
    for full_name in (name for name in (*tensors, *values) if name.startswith(_PREFIX)):
        name, _, key = full_name.removeprefix(_PREFIX).rpartition(".")
        kept.setdefault(name, {})[key] = full_name
    return kept, own


def _types(value: Any) -> list[torch.dtype]:
    """Of the tensors in it, which may be in containers."""
    return [tensor.dtype for tensor in tensors_in(value)]


def _moved(value: Any, device: torch.device) -> Any:
    """With its tensors on the device, in the types that they have."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), value)


def _encoded(name: str, key: str, value: Any) -> Tensor:
    """What is neither a tensor nor a plain value, as bytes."""
    kind = type(value).__name__
    if any(is_sharded(part) for part in tensors_in(value)):
        raise MisuseError(f"the optimizer keeps a {kind} of shards ({key}) of {name}: a checkpoint holds whole tensors")
    try:
        return to_bytes(key, value)
    except CheckpointError as error:
        problem = f"the optimizer keeps a {kind} ({key}) of {name}: only tensors, numbers and containers of them"
        raise MisuseError(f"{problem} are saved") from error


def _is_whole(value: Any, parameter: Tensor) -> bool:
    other = isinstance(value, Tensor) and value.ndim > 0 and value.shape != parameter.shape
    return other and is_sharded(parameter) and not is_sharded(value)


def _read(tensors: Mapping[str, Tensor], values: Mapping[str, Any], parameter: Tensor, name: str) -> Any:
    if name not in tensors:
        return values[name]
    return from_bytes(tensors[name]) if values.get(name) == _AS_BYTES else _part(tensors[name], parameter, name)


def _part(tensor: Tensor, parameter: Tensor, name: str) -> Tensor:
    if is_sharded(parameter) and tensor.ndim and tensor.shape != parameter.shape:
        raise ValueError(f"{name} has another shape than its parameter, and cannot be cut into the same shards")
    return shard_like(tensor, parameter).clone()
