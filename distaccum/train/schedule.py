"""Makes the schedule of a run, of whatever names it or is one; begin with :func:`make_schedule`."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from distaccum.accumulation.tracker import Schedule
from distaccum.config.instantiate import build, signature_of, target_of
from distaccum.errors import ConfigError

_log = logging.getLogger(__name__)
_REMEDY = "Give a function of the number of applied updates that returns a factor of the rate: lambda step: 0.9**step"
_ENDS = ("total_steps", "num_training_steps")  # what schedulers call the updates of a run
_LOOKED_AT, _LOOKS = 10_000, 100  # updates at the run's beginning, and how many of their factors are looked at before
_SMALL = 0.01


def make_schedule(stated: Any, *, total_steps: int, peak: float, optimizers: Sequence[Optimizer] = ()) -> Schedule:
    """The schedule that ``stated`` names, makes or is.

    Args:
        stated: a node with a ``_target_``; a function of the applied updates; a class of those below, or of torch's
            schedulers, or a function that makes one of an ``optimizer``, perhaps in a ``functools.partial``; or a
            scheduler of torch's over the optimizer.
        total_steps: updates of the run, for what takes them as ``total_steps`` or ``num_training_steps``.
        peak: the rate that a scheduler's own rates (``max_lr``, ``eta_min``) stand beside: ``optim.lr``, or that of the
            first group of optimizers that are given.
        optimizers: those that are given.

    Raises:
        ConfigError: it cannot be built, is no function of the applied updates alone, or gives no factor from 0 on.
    """
    if isinstance(stated, dict):
        target, make, has = target_of("schedule", stated), partial(build, "schedule", stated), stated
        name = stated["_target_"]
    else:
        target = stated.func if isinstance(stated, partial) else stated
        make, has, name = partial(_call, stated), getattr(stated, "keywords", {}), name_of(target)
    if isinstance(target, ReduceLROnPlateau) or (inspect.isclass(target) and issubclass(target, ReduceLROnPlateau)):
        problem = "is a scheduler of an optimizer, and a schedule is a function of the applied updates"
        remedy = "Use callbacks=plateau (distaccum.train.callbacks.ReduceLROnPlateau), next to a schedule"
        raise ConfigError("schedule", name, problem, remedy)
    takes = signature_of(target)
    schedule: Any
    if isinstance(target, LRScheduler):
        schedule = TorchSchedule(name, *_copies(target, name, optimizers), total_steps=total_steps)
    elif next(iter(takes), "") == "optimizer":
        by_epochs = "epochs" in has or "steps_per_epoch" in has
        ends = {end: total_steps for end in _ENDS if end in takes and end not in has and not by_epochs}
        schedule = TorchSchedule(name, partial(make, **ends), [peak], total_steps=total_steps)
    elif has is stated or (inspect.isclass(target) and "total_steps" in takes and "total_steps" not in has):
        schedule = make(total_steps=total_steps)
    else:
        schedule = make() if inspect.isclass(target) else stated
    _check_factors(schedule, name, total_steps, peak)
    found: Schedule = schedule
    return found


def built_with(group: Mapping[str, Any]) -> float:
    """The rate of an optimizer's group, before a scheduler has set another one."""
    return float(group.get("initial_lr", group["lr"]))


def name_of(thing: Any) -> str:
    """The dotted name of a class or function; of any other object its class's."""
    named = thing if hasattr(thing, "__qualname__") else type(thing)
    return f"{named.__module__}.{named.__qualname__}"


def _call(make: Callable[..., Any], *given: Any, **named: Any) -> Any:
    try:
        return make(*given, **named)
    except (TypeError, ValueError) as error:
        remedy = "Give its arguments, as functools.partial(CosineAnnealingLR, T_max=100)"
        raise ConfigError("schedule", name_of(make), f"{type(error).__name__}: {error}", remedy) from error


def _check_factors(schedule: Any, name: str, total_steps: int, peak: float) -> None:
    most, highest = min(total_steps, _LOOKED_AT), 0.0
    for step in range(0, most, max(1, most // _LOOKS)):
        try:
            factor: Any = schedule(step) if callable(schedule) else None
        except (TypeError, ValueError, LookupError, ArithmeticError) as error:
            problem = f"cannot be called with {step} applied updates ({type(error).__name__}: {error})"
            raise ConfigError("schedule", name, problem, _REMEDY) from error
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 <= factor < math.inf:
            which = f"after {step} updates" if step else "for the first update"
            raise ConfigError("schedule", name, f"gives {factor!r} {which}", _REMEDY)
        highest = max(highest, factor)
    if highest <= _SMALL and peak != 1.0:
        rate = "the highest factor of schedule=%s is %g, so that the highest rate is %g: %s"
        _log.warning(rate, name, highest, highest * peak, "a schedule gives a factor of the rate, not the rate")


# Torch's schedulers.

_UNUSUAL = 0.123  # a momentum that no scheduler sets: one that sets any is seen at once, before the first update
_SAME = 1e-6  # relative difference of factors that are one


class TorchSchedule:
    """The rates that a scheduler of torch's gives an optimizer, as factors of those that its groups have.

    The scheduler runs through its steps on an optimizer of a number for each group, once: so a factor depends on the
    step alone, whatever a run has resumed from. It may set rates only, may not look at a loss, and gives all groups one
    factor.

    Args:
        name: of the scheduler, for errors.
        make: makes it over an optimizer.
        rates: of the optimizer's groups.
        total_steps: updates of the run. What is asked for beyond them is the last update's factor.

    Raises:
        ConfigError: it cannot be built, or sets something else too, such as the momentum.
    """

    def __init__(
        self, name: str, make: Callable[[Optimizer], LRScheduler], rates: Sequence[float], *, total_steps: int
    ) -> None:
        if not max(rates) > 0:
            raise ConfigError("schedule", name, f"and the first rate is {rates[0]}", "Give a positive rate")
        self._name, self._rates, self._last = name, rates, max(0, total_steps - 1)
        groups = [{"params": [torch.zeros(1)], "lr": rate} for rate in rates]
        self._optimizer = SGD(groups, lr=max(rates), momentum=_UNUSUAL)
        self._first = self._others()
        self._scheduler = make(self._optimizer)
        if not isinstance(self._scheduler, LRScheduler) or isinstance(self._scheduler, ReduceLROnPlateau):
            problem = f"makes a {type(self._scheduler).__name__}, which torch's loop does not step by updates alone"
            raise ConfigError("schedule", name, problem, _REMEDY)
        self._optimizer.step()  # of no gradient: a scheduler warns where it steps before its optimizer
        self._factors: list[float] = []
        self._note()

    def __call__(self, step: int) -> float:
        """The factor for the update after ``step`` applied ones."""
        step = min(step, self._last)
        while len(self._factors) <= step:
            self._scheduler.step()
            self._note()
        return self._factors[step]

    def _note(self) -> None:
        now = [float(group["lr"]) for group in self._optimizer.param_groups]
        pairs = [(rate, built_with) for rate, built_with in zip(now, self._rates, strict=True) if rate or built_with]
        factors = [rate / built_with if built_with else math.inf for rate, built_with in pairs]
        if not all(math.isclose(one, factors[0], rel_tol=_SAME) for one in factors):
            problem = f"multiplies the rates of the optimizer's groups by {', '.join(f'{one:g}' for one in factors)}"
            raise ConfigError("schedule", self._name, problem, "Give all groups one factor, and each a rate of its own")
        self._factors.append(factors[0])
        changed = [
            name for (i, name), value in self._others().items() if value != self._first.setdefault((i, name), value)
        ]
        if changed:
            problem = f"sets {changed[0]} too, and a schedule sets rates"
            remedy = "Switch that off, as with cycle_momentum: false"
            raise ConfigError("schedule", self._name, problem, remedy)

    def _others(self) -> dict[tuple[int, str], Any]:
        groups = enumerate(self._optimizer.param_groups)
        rates = ("params", "lr", "initial_lr")
        return {(i, name): value for i, group in groups for name, value in group.items() if name not in rates}


def _copies(
    scheduler: LRScheduler, name: str, optimizers: Sequence[Optimizer]
) -> tuple[Callable[[Optimizer], LRScheduler], list[float]]:
    """What puts a copy of the scheduler over another optimizer, and the rates that its own has been built with.

    Raises:
        ConfigError: its optimizer is not the one that is given.
    """
    own: Optimizer = scheduler.optimizer
    if len(optimizers) != 1 or optimizers[0] is not own:
        problem = "sets the rates of an optimizer that is not the one given, and no other, as optimizer="
        raise ConfigError("schedule", name, problem, "Give optimizer= the one that it was made with, or partial(class)")

    def copy(optimizer: Optimizer) -> LRScheduler:
        LambdaLR(optimizer, lambda _: 1.0)  # torch's mark on step(), without which a scheduler warns
        groups = zip(own.param_groups, optimizer.param_groups, scheduler.get_last_lr(), strict=True)
        for group, there, lr in groups:  # the rates of its own step: an engine has set others since
            of_more = {key: value for key, value in group.items() if key not in there}  # as betas, which it may set
            there.update(of_more, lr=float(lr))
        return deepcopy(scheduler, {id(own): optimizer})

    return copy, list(map(built_with, own.param_groups))
