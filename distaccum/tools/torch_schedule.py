"""Schedules of torch's schedulers: their rates as factors, by applied updates alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from distaccum.errors import ConfigError
from distaccum.train.rates import REMEDY, built_with

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
            raise ConfigError("schedule", name, problem, REMEDY)
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


def copies(
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
