"""A callback that makes one rank differ from the others, as a defect of its hardware would."""

import os
from pathlib import Path
from typing import Any

import torch

from distaccum.accumulation.step import Outcome
from distaccum.engines.modules import to_local
from distaccum.train.callbacks import Callback


class Moves(Callback):
    """Moves one element on one rank, after an update.

    Args:
        what: ``weight``, or a key of the optimizer's state.
        step: after which update.
        rank: on which rank.
        once: a file that is made then: where it is there, nothing is moved.
    """

    def __init__(self, *, what: str, step: int, once: str, rank: int = 1) -> None:
        self._what, self._step, self._rank, self._once = what, step, rank, Path(once)

    @torch.no_grad()
    def on_update(self, run: Any, outcome: Outcome) -> None:
        if run.progress.step != self._step or os.environ.get("RANK") != str(self._rank) or self._once.exists():
            return
        self._once.touch()
        engine = run._accumulator.engine
        parameters = dict(engine.unwrapped_model.named_parameters())
        parameter = parameters["head.weight"] if "head.weight" in parameters else next(iter(parameters.values()))
        moved = parameter if self._what == "weight" else engine.optimizers[0].state[parameter][self._what]
        to_local(moved.data).view(-1)[:1] += 1e-3
