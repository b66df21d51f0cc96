"""Torch's learning-rate schedulers, stepped only by the accumulator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from typing import Any, NoReturn

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from distaccum.data.hooks import WindowHook
from distaccum.data.window import Window
from distaccum.engines.base import Engine, StateLayout
from distaccum.errors import ConfigError, MisuseError

# Optimizers that train with other weights than those to evaluate, as schedule-free ones do.
#
# Source: A. Defazio et al., "The Road Less Scheduled" (2024). Such an optimizer has methods ``train()`` and ``eval()``,
# which replace the weights in place. It makes steps after the first, and is evaluated and saved after the second.


def has_two_weights(optimizer: object) -> bool:
    """Whether it trains with other weights than those to evaluate."""
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


class EvaluationWeights(WindowHook):
    """Switches those of the optimizers that have two kinds of weights; without any it does nothing.

    A forward outside of a window switches by itself, if the model is in evaluation mode or without gradients.

    Args:
        optimizers: of one run; they are switched to the weights to evaluate.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers: list[Any] = list(filter(has_two_weights, optimizers))
        self.eval()

    @property
    def needed(self) -> bool:
        """Whether there is such an optimizer."""
        return bool(self._optimizers)

    def attach(self, engine: Engine, in_window: Callable[[], bool]) -> None:
        """Watches the forwards of the engine's model; those ``in_window`` never switch, as those of a proof.

        Raises:
            ConfigError: there is such an optimizer, and the engine leaves a rank a share only, or weights that are
                roundings: a switch would not reach all weights.
        """
        if not self._optimizers:
            return
        if engine.facts.state_layout is not StateLayout.FULL:
            problem = "its train() and eval() replace the weights, of which this engine gives a rank a share only"
            raise ConfigError("optimizer", type(self._optimizers[0]).__name__, problem, "Use engine=ddp")
        if engine.facts.rounds_weights:
            problem = "its train() and eval() replace the fp32 masters, and forwards compute with their roundings"
            raise ConfigError("optimizer", type(self._optimizers[0]).__name__, problem, "Use precision=bf16")
        self._in_window = in_window
        self._hook = engine.unwrapped_model.register_forward_pre_hook(self._before_forward)

    def window_begins(self, window: Window) -> None:
        """The weights to train with; where they are in place already, the optimizers do nothing."""
        for optimizer in self._optimizers:
            optimizer.train()

    def eval(self) -> None:
        """The weights to evaluate and to save, until the next window."""
        for optimizer in self._optimizers:
            optimizer.eval()

    def close(self) -> None:
        """Leaves the weights to evaluate in place."""
        if self._optimizers:
            self._hook.remove()
            self.eval()

    def _before_forward(self, model: Any, _: Any) -> None:
        if not self._in_window() and not (model.training and torch.is_grad_enabled()):
            self.eval()


class OwnedScheduler:
    """A torch scheduler that only its owner steps: the user's ``scheduler.step()`` raises MisuseError.

    The scheduler gets a subclass of its class, and its ``__dict__`` stays its own: so its ``state_dict`` holds what it
    held before. A copy of it, by ``copy``, ``deepcopy`` or pickle, is of its own class and owned by nobody.
    """

    def __init__(self, scheduler: LRScheduler) -> None:
        self._scheduler, self.kind = scheduler, type(scheduler)
        self.takes_metric = isinstance(scheduler, ReduceLROnPlateau)
        scheduler.__class__ = _owned(type(scheduler))

    def step(self) -> None:
        """Steps after an applied update, unless it takes a metric."""
        if not self.takes_metric:
            self.kind.step(self._scheduler)

    def step_with(self, metric: float) -> None:
        """Steps a scheduler that takes a metric."""
        plateau: Any = self.kind
        plateau.step(self._scheduler, metric)

    def state_dict(self) -> dict[str, Any]:
        """A copy of the scheduler's state."""
        return deepcopy(self._scheduler.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what :meth:`state_dict` gave."""
        self._scheduler.load_state_dict(deepcopy(state))

    def release(self) -> None:
        """Gives the scheduler back: anybody may step it."""
        self._scheduler.__class__ = self.kind


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
