"""The settings of the optimizers' groups: what has changed since the start is state, by name and in plain values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_PREFIX = "groups."
_KERNELS = ("foreach", "fused", "capturable", "differentiable")  # how a group computes, and not what
_PLAIN = (bool, int, float, str, NoneType)
_TENSOR, _TUPLE = "tensor", "tuple"  # keys of what JSON has no word for
_RATES = ("lr", "initial_lr")


class GroupSettings:
    """The settings of the optimizers' groups, learning rates among them: what has changed since the start is state.

    Some optimizers count in their groups, torch's chainable schedulers compute the next rate from the current one and
    do not save it, and a rate may have been set by hand. What has not changed is a setting of the program, which
    another run may have otherwise. So are the rates that a schedule sets anew for every update.

    Args:
        optimizers: of one run, before its first window.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.rates_are_scheduled = False
        """Whether each update's rates are set from the schedule alone, and are no state."""
        self._optimizers = optimizers
        self._first = {place: _settings(group) for place, group in self._groups()}

    def _groups(self) -> Iterator[tuple[tuple[int, int], dict[str, Any]]]:
        for i, optimizer in enumerate(self._optimizers):
            for j, group in enumerate(optimizer.param_groups):
                yield (i, j), group

    def _is_ours(self, key: str) -> bool:
        return not (self.rates_are_scheduled and key in _RATES)

    def changed(self) -> dict[str, Any]:
        """Copies of the settings that differ from the first ones, as ``groups.OPTIMIZER.GROUP.KEY``; fit for JSON."""
        return {
            f"{_PREFIX}{i}.{j}.{key}": _to_plain(value)
            for (i, j), group in self._groups()
            for key, value in _settings(group).items()
            if self._is_ours(key) and not _same(self._first.get((i, j), {}), key, value)
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restores :meth:`changed`, found by its names; the other settings are the first ones again.

        Raises:
            ValueError: there are other optimizers or groups.
        """
        groups = dict(self._groups())
        wanted = {place: dict(self._first.get(place, {})) for place in groups}
        for name, value in saved.items():
            if not name.startswith(_PREFIX):
                continue
            i, j, key = name.removeprefix(_PREFIX).split(".", 2)
            place = int(i), int(j)
            if place not in groups:
                raise ValueError(f"{key!r} was saved of group {j} of optimizer {i}, and there is no such group")
            wanted[place][key] = _from_plain(value)
        for place, group in groups.items():
            for key in _settings(group).keys() - wanted[place].keys():
                if self._is_ours(key):
                    del group[key]  # has come since
            for key, value in wanted[place].items():
                if self._is_ours(key):
                    set_setting(group, key, value)


def set_setting(group: dict[str, Any], key: str, value: Any) -> None:
    """Sets one of a group's settings; what is a tensor stays the same one, as compiled steps have it."""
    if isinstance(group.get(key), Tensor):
        group[key].copy_(torch.as_tensor(value))
    else:
        group[key] = deepcopy(value)


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: deepcopy(value)
        for key, value in group.items()
        if key != "params" and key not in _KERNELS and isinstance(value, (*_PLAIN, Tensor, tuple, list))
    }


def _same(first: Mapping[str, Any], key: str, value: Any) -> bool:
    return key in first and bool(_to_plain(first[key]) == _to_plain(value))


def _to_plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return {_TENSOR: value.tolist(), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, tuple):
        return {_TUPLE: [_to_plain(part) for part in value]}
    return [_to_plain(part) for part in value] if isinstance(value, list) else value


def _from_plain(value: Any) -> Any:
    if isinstance(value, Mapping) and _TENSOR in value:
        return torch.tensor(value[_TENSOR], dtype=getattr(torch, value["dtype"]))
    if isinstance(value, Mapping) and _TUPLE in value:
        return tuple(_from_plain(part) for part in value[_TUPLE])
    return [_from_plain(part) for part in value] if isinstance(value, list) else value
