"""Torch's learning-rate schedulers, stepped only by the accumulator, and the settings of the optimizers' groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from types import NoneType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from distaccum.errors import ConfigError, MisuseError

_KERNELS = ("foreach", "fused", "capturable", "differentiable")  # of a group: how it computes, and not what


class OwnedScheduler:
    """A torch scheduler that only its owner steps: the user's ``scheduler.step()`` raises MisuseError.

    The scheduler gets a subclass of its class, and its ``__dict__`` stays its own: so its ``state_dict`` holds what it
    held before. A copy of it, by ``copy``, ``deepcopy`` or pickle, is of its own class and owned by nobody.
    """

    def __init__(self, scheduler: LRScheduler) -> None:
        self._scheduler, self._class = scheduler, type(scheduler)
        self.takes_metric = isinstance(scheduler, ReduceLROnPlateau)
        scheduler.__class__ = _owned(type(scheduler))

    def step(self) -> None:
        """Steps after an applied update, unless it takes a metric."""
        if not self.takes_metric:
            self._class.step(self._scheduler)

    def step_with(self, metric: float) -> None:
        """Steps a scheduler that takes a metric."""
        plateau: Any = self._class
        plateau.step(self._scheduler, metric)

    def state_dict(self) -> dict[str, Any]:
        """A copy of the scheduler's state."""
        return deepcopy(self._scheduler.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what :meth:`state_dict` gave, or what 0.1 did: with the settings of the optimizer's groups."""
        if state.keys() == {"scheduler", "groups"}:
            for group, settings in zip(self._scheduler.optimizer.param_groups, state["groups"], strict=True):
                _set(group, settings)
            state = state["scheduler"]
        self._scheduler.load_state_dict(deepcopy(state))

    def release(self) -> None:
        """Gives the scheduler back: anybody may step it."""
        self._scheduler.__class__ = self._class


def check_schedulers(schedulers: Iterable[LRScheduler], optimizers: Sequence[Optimizer]) -> None:
    """Raises what is wrong with the schedulers of these optimizers.

    Raises:
        ConfigError: one is of another optimizer, whose rate nobody uses.
        MisuseError: another accumulator owns one.
    """
    for scheduler in schedulers:
        name = type(scheduler).__name__
        if isinstance(scheduler, _Owned):
            remedy = "call close() of that one before, or make a new scheduler"
            raise MisuseError(f"scheduler {name} belongs to another Accumulator: {remedy}")
        optimizer = getattr(scheduler, "optimizer", None)
        if optimizer is not None and not any(optimizer is one for one in optimizers):
            problem = "it sets the learning rate of an optimizer that is not the accumulator's"
            raise ConfigError("scheduler", name, problem, "Make it from the optimizer that you give")


class _Owned:
    """Marks the subclass of an owned scheduler."""

    def step(self, *_: object, **__: object) -> NoReturn:
        if isinstance(self, ReduceLROnPlateau):
            remedy = "write acc.scheduler_step(metric) in its place, between two windows"
        else:
            remedy = "delete the line, as applied updates step it"
        raise MisuseError(f"scheduler.step() was called by hand: {remedy}")

    def __reduce_ex__(self, protocol: Any) -> Any:
        own: Any = type(self).__mro__[2]
        function, arguments, *state = own.__reduce_ex__(self, protocol)
        return (function, tuple(own if part is type(self) else part for part in arguments), *state)


def _owned(kind: type[Any]) -> type[Any]:
    return type(kind.__name__, (_Owned, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})


class GroupSettings:
    """The settings of the optimizers' groups, learning rates among them: what has changed since the start is state.

    Torch's chainable schedulers compute the next rate from the current one and do not save it, and a rate may have been
    set by hand. What has not changed is a setting of the program, which another run may have otherwise.

    Args:
        optimizers: of one run, before its first window.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._first = self._now()

    def _now(self) -> list[list[dict[str, Any]]]:
        return [[_settings(group) for group in optimizer.param_groups] for optimizer in self._optimizers]

    def changed(self) -> list[list[dict[str, Any]]]:
        """The settings that differ from the first ones, by optimizer and group: copies."""
        pairs = zip(self._first, self._now(), strict=True)
        return [[_difference(*groups) for groups in zip(first, now, strict=True)] for first, now in pairs]

    def restore(self, changed: Sequence[Sequence[Mapping[str, Any]]]) -> None:
        """Restores :meth:`changed`; the other settings are the first ones again.

        Raises:
            ValueError: there are other optimizers or groups.
        """
        for optimizer, first, saved in zip(self._optimizers, self._first, changed, strict=True):
            for group, settings, more in zip(optimizer.param_groups, first, saved, strict=True):
                for key in _settings(group).keys() - settings.keys():
                    del group[key]  # has come since
                _set(group, settings | dict(more))


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    plain = (bool, int, float, str, NoneType, Tensor, tuple, list)
    return {key: deepcopy(value) for key, value in group.items() if _is_setting(key) and isinstance(value, plain)}


def _difference(first: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in now.items() if key not in first or not _same(first[key], value)}


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return torch.equal(torch.as_tensor(one), torch.as_tensor(other))
    return bool(one == other)


def _set(group: dict[str, Any], settings: Mapping[str, Any]) -> None:
    """Sets a group's settings; what is a tensor stays the same one, as compiled steps have it."""
    for key, value in settings.items():
        if isinstance(group.get(key), Tensor):
            group[key].copy_(torch.as_tensor(value))
        else:
            group[key] = deepcopy(value)


def _is_setting(key: str) -> bool:
    return key != "params" and key not in _KERNELS
