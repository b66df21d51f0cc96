"""Optimizer state by the names of parameters: ``state.NAME.KEY``, whichever optimizer, rank or shard holds it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from distaccum.engines.shards import shard_like, whole

_PREFIX = "state."


def collect(
    optimizers: Iterable[Optimizer], parameters: Mapping[str, nn.Parameter], *, gives: Callable[[int], bool]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and plain values that the optimizers here keep of the parameters; a collective where they are sharded.

    Args:
        optimizers: over disjoint sets of the parameters.
        parameters: by name, in the same order on every rank.
        gives: whether this rank gives the n-th parameter's state, of those it holds a part of.
    """
    kept = {id(p): entries for optimizer in optimizers for p, entries in optimizer.state.items()}
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    for n, (name, parameter) in enumerate(parameters.items()):
        for key, value in kept.get(id(parameter), {}).items():
            full = whole(value) if isinstance(value, Tensor) else value
            if gives(n):
                (tensors if isinstance(value, Tensor) else values)[f"{_PREFIX}{name}.{key}"] = full
    return tensors, values


def load(
    optimizers: Iterable[Optimizer], parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor],
    values: Mapping[str, Any],
) -> None:  # fmt: skip
    """Gives each optimizer here what was kept of its parameters. Settings of its groups stay as they are.

    A parameter of which nothing was kept, as the saved run had never used it, begins anew.

    Raises:
        KeyError: something was kept of a parameter that there is not.
    """
    kept: dict[str, dict[str, str]] = {}  # by parameter: by key: the whole name
    for full_name in (*tensors, *values):
        name, _, key = full_name.removeprefix(_PREFIX).rpartition(".")
        kept.setdefault(name, {})[key] = full_name
    unknown = kept.keys() - parameters.keys()
    if unknown:
        raise KeyError(f"optimizer state of {sorted(unknown)[0]!r}, which is no trained parameter of the model")
    names = {id(parameter): name for name, parameter in parameters.items()}
    for optimizer in optimizers:
        held = [p for group in optimizer.param_groups for p in group["params"]]
        state = {
            i: {
                key: shard_like(tensors[full], parameter).clone() if full in tensors else values[full]
                for key, full in kept[names[id(parameter)]].items()
            }
            for i, parameter in enumerate(held)
            if names.get(id(parameter)) in kept
        }
        # Torch moves each entry to where, and as what, this run's settings want it.
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": state, "param_groups": groups})
