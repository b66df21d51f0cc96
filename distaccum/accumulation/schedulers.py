"""Torch's learning-rate schedulers, stepped only by the accumulator."""

from __future__ import annotations

from typing import Any, NoReturn

from torch.optim.lr_scheduler import LRScheduler

from distaccum.errors import MisuseError


class OwnedScheduler:
    """A torch scheduler that only its owner steps: the user's ``scheduler.step()`` raises MisuseError.

    Its state includes the settings of the optimizer's groups: torch's chainable schedulers compute the next learning
    rate from the current one, and do not save it.
    """

    def __init__(self, scheduler: LRScheduler) -> None:
        self._scheduler, self._step = scheduler, scheduler.step
        scheduler.step = self._refuse  # type: ignore[assignment,method-assign]  # there is no hook for it

    def step(self) -> None:
        """Steps after an applied update."""
        self._step()

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's state, and the settings of the optimizer's groups."""
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self._scheduler.optimizer.param_groups]
        state = {name: value for name, value in self._scheduler.state_dict().items() if name != "step"}
        return {"scheduler": state, "groups": groups}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what :meth:`state_dict` gave."""
        for group, saved in zip(self._scheduler.optimizer.param_groups, state["groups"], strict=True):
            group.update(saved)
        self._scheduler.load_state_dict(state["scheduler"])

    def _refuse(self, *_: object) -> NoReturn:
        raise MisuseError("scheduler.step() was called by hand: delete the line, as applied updates step it")
