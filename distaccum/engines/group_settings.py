"""The settings of the optimizers' groups: what has changed since the start is state, by name and in plain values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from operator import is_
from types import NoneType
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from distaccum.engines.rules import foreign_hooks
from distaccum.errors import MisuseError

# The optimizers' groups: a rank's part while the engine steps, and all of the user's parameters otherwise.
#
# A loop over ``optimizer.param_groups`` (a norm, a clamp, a copy of the weights) then does the same on every engine. If
# it met one rank's part, or flat copies of it, forwards would go on with other weights than the step.


class WholeGroups:
    """Within the ``with`` block groups hold what the engine has put there; outside what the user gave.

    Args:
        optimizers: before the engine changes their groups.
        drops_empty: whether the engine removes groups without parameters.
    """

    def __init__(self, optimizers: Sequence[Optimizer], *, drops_empty: bool = False) -> None:
        self._optimizers = optimizers
        for groups in (optimizer.param_groups for optimizer in optimizers if drops_empty):
            groups[:] = [group for group in groups if group["params"]]
        self._given: list[list[Any]] = [group["params"] for group in self._groups()]
        self._parameters = [list(parameters) for parameters in self._given]
        self._engines: list[list[Any]] = []
        self._numbers = [len(optimizer.param_groups) for optimizer in optimizers]
        self._added: list[list[dict[str, Any]]] = [[] for _ in optimizers]  # by a user, and put aside
        self._inside = False
        self._hooks: list[RemovableHandle] = []
        self._refused: frozenset[Any] = frozenset()

    def _groups(self) -> Iterator[dict[str, Any]]:
        """Those of now: loading an optimizer's state makes new ones, and a user may have added some."""
        for optimizer in self._optimizers:
            yield from optimizer.param_groups

    def show(self, *, state_is_whole: bool = False, copies: bool = False) -> None:
        """Called once the engine has changed the groups: keeps what it put there, and puts the user's back.

        Args:
            state_is_whole: of the optimizers, on every rank; otherwise their ``state_dict`` is refused.
            copies: whether the engine steps other tensors than the parameters, which then have no state.
        """
        begun = {p for optimizer in self._optimizers for p in optimizer.state}  # when it was made, as Adagrad's
        begun |= {p for group in self._groups() for p in group["params"]}  # stepped themselves, as those of keep_fp32
        self.__exit__()
        if state_is_whole:
            return
        self._refused = frozenset(p for given in self._parameters for p in given if copies and p not in begun)
        for optimizer in self._optimizers:
            self._hooks.append(optimizer.register_state_dict_pre_hook(self._before_state))
            self._hooks.append(optimizer.register_load_state_dict_pre_hook(self._before_state))

    def release(self) -> None:
        """Ends what :meth:`show` refuses."""
        while self._hooks:
            self._hooks.pop().remove()

    def _before_state(self, *_: object) -> None:
        if not self._inside:
            raise MisuseError(
                "the optimizer's state_dict() and load_state_dict() see one rank's share on this engine: call the "
                "accumulator's, acc.state_dict() and acc.load_state_dict()"
            )

    def __enter__(self) -> None:
        self._inside = True
        for optimizer, number, added in zip(self._optimizers, self._numbers, self._added, strict=True):
            added[:] = optimizer.param_groups[number:]
            del optimizer.param_groups[number:]
        for group, engines in zip(self._groups(), self._engines, strict=False):
            group["params"] = engines

    def __exit__(self, *_: object) -> None:
        self._inside = False
        self._engines = [group["params"] for group in self._groups()]
        for group, given in zip(self._groups(), self._given, strict=False):
            group["params"] = given
        for optimizer, added in zip(self._optimizers, self._added, strict=True):
            optimizer.param_groups += added
            added.clear()

    def check(self) -> None:
        """Called outside of the block.

        Raises:
            MisuseError: somebody has added or removed a group, or a parameter of one; or has asked for the state of a
                parameter that has none.
        """
        if not all(self._refused.isdisjoint(optimizer.state) for optimizer in self._optimizers):
            raise MisuseError(
                "optimizer.state was asked for a parameter's state, and this engine steps copies, which have it: leave "
                "the state to the engine, or use engine=ddp"
            )
        now = [group["params"] for group in self._groups()]
        if len(now) != len(self._parameters) or not all(map(_same_groups, now, self._parameters)):
            raise MisuseError(
                "the optimizer's groups hold other parameters than when the engine was made (add_param_group, or "
                'group["params"] written by hand): set them up before, or close() the accumulator and make a new one'
            )


def _same_groups(now: list[Any], before: list[Any]) -> bool:
    return len(now) == len(before) and all(map(is_, now, before))


_PREFIX = "groups."
_KERNELS = ("foreach", "fused", "capturable", "differentiable")  # how a group computes, and not what
_PLAIN = (bool, int, float, str, NoneType)
_TENSOR, _TUPLE = "tensor", "tuple"  # keys of what JSON has no word for
_RATES = ("lr", "initial_lr")
OTHER_SETTINGS = (
    "ranks would step with different settings of the optimizer's groups (a learning rate that depends on the rank?): "
    "make them the same on every rank"
)


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


def plain_settings(optimizers: Sequence[Optimizer], *, hooks: bool = False) -> dict[str, Any]:
    """What decides a step next to gradients and state, by name; nothing is read from a device.

    Args:
        optimizers: of one run.
        hooks: also which step hooks they have.
    """
    found: dict[str, Any] = {}
    for i, optimizer in enumerate(optimizers):
        found[f"the class of optimizer {i}"] = type(optimizer).__name__
        if hooks:
            found[f"the step hooks of optimizer {i}"] = foreign_hooks(optimizer)
        for j, group in enumerate(optimizer.param_groups):
            for key, value in _plain_items(group):
                found[f"{key} of group {j} of optimizer {i}"] = value
    return found


def fingerprint(optimizers: Sequence[Optimizer], *more: object, hooks: bool = False, world_size: int) -> float:
    """A whole number that stands for :func:`plain_settings`: sums of its square over the ranks are exact in fp64."""
    bits = min(20, (52 - 2 * world_size.bit_length()) // 2)
    told: list[Any] = [list(_plain_items(group)) for optimizer in optimizers for group in optimizer.param_groups]
    told += [[type(optimizer).__name__, foreign_hooks(optimizer) if hooks else ""] for optimizer in optimizers]
    return float(crc32(repr((told, more)).encode()) % 2**bits)


def _plain_items(group: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in group.items():
        if key == "params":
            yield "the number of parameters", len(value)
        elif isinstance(value, _PLAIN):
            if key not in _KERNELS:
                yield key, value
        elif isinstance(value, tuple | list):
            yield key, [one for one in value if isinstance(one, _PLAIN)]
        elif isinstance(value, Tensor) and value.device.type == "cpu" and value.numel() == 1:
            yield key, value.item()


def differ(sums: Sequence[float], world_size: int) -> bool:
    """Whether numbers are not the same on all ranks, given their sum and that of their squares."""
    total, squares = sums
    return total**2 != world_size * squares


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
