"""Makes the schedule of a run, of whatever names it or is one; begin with :func:`make_schedule`."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from distaccum.accumulation.tracker import Schedule
from distaccum.config.instantiate import build, signature_of, target_of
from distaccum.errors import ON_ALL_RANKS, ConfigError
from distaccum.program import TORCH_SCHEDULE, load

_log = logging.getLogger(__name__)
REMEDY = "Give a function of the number of applied updates that returns a factor of the rate: lambda step: 0.9**step"
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
    torchs, copies = map(load, TORCH_SCHEDULE)
    schedule: Any
    if isinstance(target, LRScheduler):
        schedule = torchs(name, *copies(target, name, optimizers), total_steps=total_steps)
    elif next(iter(takes), "") == "optimizer":
        by_epochs = "epochs" in has or "steps_per_epoch" in has
        ends = {end: total_steps for end in _ENDS if end in takes and end not in has and not by_epochs}
        schedule = torchs(name, partial(make, **ends), [peak], total_steps=total_steps)
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
            raise ConfigError("schedule", name, problem, REMEDY) from error
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 <= factor < math.inf:
            which = f"after {step} updates" if step else "for the first update"
            raise ConfigError("schedule", name, f"gives {factor!r} {which}", REMEDY)
        highest = max(highest, factor)
    if highest <= _SMALL and peak != 1.0:
        rate = "the highest factor of schedule=%s is %g, so that the highest rate is %g: %s"
        problem = "a schedule gives a factor of the rate, not the rate"
        _log.warning(rate, name, highest, highest * peak, problem, extra=ON_ALL_RANKS)
