"""A learning rate, betas and weight decay that follow a global batch which grows: of each stage of ``batch.schedule``.

What is configured holds for ``batch.global_size``. In a stage of r times as many samples the rate is by ``scale_lr``
``sqrt(r)`` times as high (S. Malladi et al., "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms", 2022) or
r times (P. Goyal et al., "Accurate, Large Minibatch SGD", 2017). A beta, or a momentum, is taken to the power of r: it
forgets as much in as many samples (D. Busbridge et al., "How to Scale Your EMA", 2023). The weight decay is such that
its product with the rate is r times as large: weights shrink as much in as many samples.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from math import sqrt
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from distaccum.accumulation.accumulator import Accumulator
from distaccum.accumulation.schedulers import has_two_weights
from distaccum.data.hooks import WindowHook
from distaccum.data.window import Window
from distaccum.engines.group_settings import set_setting
from distaccum.errors import ConfigError
from distaccum.train.rates import built_with

if TYPE_CHECKING:
    from distaccum.config.batch import BatchConfig
    from distaccum.train.components import TrainingComponents

_RATES: dict[str, Callable[[float], float]] = {"none": lambda _: 1.0, "sqrt": sqrt, "linear": float}
_MEMORIES, _DECAY = ("betas", "momentum"), "weight_decay"


def scaled(group: Mapping[str, Any], batch: BatchConfig, growth: float) -> dict[str, Any]:
    """The settings of a group, but its rate, in a stage of ``growth`` times ``batch.global_size``."""
    found: dict[str, Any] = {}
    for key in _MEMORIES if batch.scale_betas else ():
        if key in group:
            held = group[key]
            found[key] = type(held)(b**growth for b in held) if isinstance(held, tuple | list) else held**growth
    if batch.scale_decay and _DECAY in group:
        found[_DECAY] = group[_DECAY] * (growth / _RATES[batch.scale_lr](growth))
    return found


def stages(components: TrainingComponents) -> str:
    """What is set in each stage, for people: of the group whose weights decay most."""
    batch = components.config.batch
    groups = [group for optimizer in components.optimizers for group in optimizer.param_groups]
    group = max(groups, key=lambda one: one.get(_DECAY, 0.0))
    told = []
    for size in [*dict.fromkeys(stage["global_size"] for stage in batch.schedule), batch.global_size]:
        assert size is not None
        growth = size / batch.global_size
        values = {"lr": built_with(group) * _RATES[batch.scale_lr](growth), **scaled(group, batch, growth)}
        told.append(f"{size}: " + ", ".join(f"{key} {_shown(value)}" for key, value in values.items()))
    return "; ".join(told)


def _shown(value: Any) -> str:
    return " ".join(f"{one:.6g}" for one in (value if isinstance(value, tuple | list) else [value]))


class Growth(WindowHook):
    """Sets, for the step of each window alone, what belongs to its stage: the last window of an epoch may be smaller.

    Between two windows the groups have what is configured, and so have checkpoints; the rate stays for the records.

    Args:
        components: of the run; their optimizers have not stepped.
        accumulator: of its windows.

    Raises:
        ConfigError: there are no stages, or an optimizer has not what is to be scaled.
    """

    def __init__(self, components: TrainingComponents, accumulator: Accumulator) -> None:
        self._batch, self._plan, self._tracker = components.config.batch, components.plan, accumulator.tracker
        if not self._batch.schedule:
            problem = "and no stage's global batch is another, by which settings were to grow"
            raise ConfigError("batch.schedule", [], problem, "State the stages, or leave batch.scale_* out")
        self._optimizers = components.optimizers
        for optimizer in components.optimizers:
            _check(optimizer, self._batch)
        self._stated = [{key: group[key] for key in scaled(group, self._batch, 1.0)} for group in self._groups()]
        self._epoch: tuple[int, Any] = (-1, None)

    def _groups(self) -> Iterator[dict[str, Any]]:
        """Those of now: loading an optimizer's state makes new ones."""
        for optimizer in self._optimizers:
            yield from optimizer.param_groups

    def _growth(self) -> float:
        """Of the window that is about to step: its stage's global batch over that of the last stage."""
        progress = self._tracker.progress  # the window before is resolved: nothing waits
        if self._epoch[0] != progress.epoch:  # O(samples) where a stage lasts for tokens
            plan: Any = self._plan
            while not hasattr(plan, "stages"):  # cut otherwise
                plan = plan.plan
            self._epoch = progress.epoch, plan.epoch(progress.epoch)
        parts = self._epoch[1].parts
        size: int = parts[bisect_right(parts, progress.epoch_window, key=lambda part: part.window) - 1].size
        assert self._batch.global_size is not None
        return size / self._batch.global_size

    def before_step(self, divisor: float) -> None:
        """After the schedule has set its rate."""
        growth = self._growth()
        for group, stated in zip(self._groups(), self._stated, strict=True):
            group["lr"] = group["lr"] * _RATES[self._batch.scale_lr](growth)
            for key, value in scaled(stated, self._batch, growth).items():
                set_setting(group, key, value)

    def after_step(self, window: Window) -> None:
        """Sets what is configured again, but for the rate."""
        for group, stated in zip(self._groups(), self._stated, strict=True):
            for key, value in stated.items():
                set_setting(group, key, value)


def _check(optimizer: Optimizer, batch: BatchConfig) -> None:
    """Raises ConfigError where the optimizer has not what is to be scaled."""
    kind, groups = type(optimizer).__name__, optimizer.param_groups
    if has_two_weights(optimizer):
        problem = f"{kind}'s averages of the weights are of one rate"
        raise ConfigError(
            "batch.scale_lr", batch.scale_lr, problem, "Use another optimizer, or leave batch.scale_* out"
        )
    if batch.scale_betas and not all(any(group.get(key) for key in _MEMORIES) for group in groups):
        problem = f"{kind} has no betas and no momentum in every group"
        raise ConfigError("batch.scale_betas", True, problem, "Leave it out")
    if batch.scale_decay and not any(group.get(_DECAY) for group in groups):
        raise ConfigError("batch.scale_decay", True, f"{kind} decays no weights", "Leave it out")
