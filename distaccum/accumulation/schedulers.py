"""Torch's learning-rate schedulers, stepped only by the accumulator."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from typing import Any, NoReturn

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from distaccum.engines.group_settings import set_setting
from distaccum.errors import ConfigError, MisuseError


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
                for key, value in settings.items():
                    set_setting(group, key, value)
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
