"""One of torch's learning-rate schedulers as a schedule: a pure function of the applied updates."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import LRScheduler

from distaccum.config.checks import Node
from distaccum.config.instantiate import build, signature_of, target_of
from distaccum.errors import ConfigError

_UNUSUAL = 0.123  # a momentum that no scheduler sets: one that sets any is seen at once, before the first update


class TorchSchedule:
    """The rates that a scheduler of torch's gives an optimizer of rate ``peak``, as factors of it.

    The scheduler runs through its steps on an optimizer of one number, once: so a factor depends on the step alone,
    whatever a run has resumed from. It may set rates only, and may not look at a loss.

    Args:
        node: names the scheduler with ``_target_``, and its arguments but for the optimizer; those that take the
            number of updates as ``total_steps`` get the run's.
        peak: the rate that its own rates (``max_lr``, ``eta_min``) stand beside: ``optim.lr``, or that of the first
            group of optimizers that are given.
        total_steps: updates of the run. What is asked for beyond them is the last update's factor.

    Raises:
        ConfigError: it cannot be built, or sets something else too, such as the momentum.
    """

    def __init__(self, node: Node, *, peak: float, total_steps: int) -> None:
        if not peak > 0:
            raise ConfigError("schedule", node["_target_"], f"and the first rate is {peak}", "Give a positive rate")
        self._node, self._peak, self._last = node, peak, max(0, total_steps - 1)
        self._optimizer = SGD([torch.zeros(1)], lr=peak, momentum=_UNUSUAL)
        self._first = self._others()
        takes_end = "total_steps" in signature_of(target_of("schedule", node)) and "total_steps" not in node
        by_epochs = "epochs" in node or "steps_per_epoch" in node
        end = {"total_steps": total_steps} if takes_end and not by_epochs else {}
        self._scheduler: LRScheduler = build("schedule", node, self._optimizer, **end)
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
        self._factors.append(float(self._optimizer.param_groups[0]["lr"]) / self._peak)
        changed = [name for name, value in self._others().items() if value != self._first.get(name, value)]
        if changed:
            problem = f"sets {changed[0]} too, and a schedule sets rates"
            remedy = "Switch that off, as with cycle_momentum: false"
            raise ConfigError("schedule", self._node["_target_"], problem, remedy)

    def _others(self) -> dict[str, Any]:
        group = self._optimizer.param_groups[0]
        return {name: value for name, value in group.items() if name not in ("params", "lr")}
