"""Settings of the small runs that many tests train: at a constant rate, with nothing saved, shown or sent unasked."""

from collections.abc import Callable, Mapping
from typing import Any

from distaccum.accumulation.step import Outcome
from distaccum.config.schema import RunConfig
from distaccum.train.callbacks import Callback, Run

CONSTANT = {"_target_": "distaccum.train.schedules.Constant"}
NOTHING: Mapping[str, Any] = {}


class At(Callback):
    """Does something after the update of a number."""

    def __init__(self, step: int, act: Callable[[Run], object]) -> None:
        self._step, self._act = step, act

    def on_update(self, run: Run, outcome: Outcome) -> None:
        if run.progress.step == self._step:
            self._act(run)


def settings(
    batch: tuple[int, int | str] | None,
    trainer: Mapping[str, Any],
    /,
    *,
    save: int = 0,
    checkpoint: Mapping[str, Any] = NOTHING,
    metrics: Mapping[str, Any] = NOTHING,
    **groups: Any,
) -> RunConfig:
    """``batch``: global and micro-batch in samples, None for the defaults; ``save``: ``checkpoint.every``."""
    values = {
        "batch": dict(zip(("global_size", "micro_size"), batch or (), strict=False)),
        "schedule": CONSTANT,
        "trainer": dict(trainer),
        "checkpoint": {"every": save, **checkpoint},
        "metrics": {"console": False, "wandb": {"mode": "disabled"}, **metrics},
    }
    return RunConfig.from_dict(values | groups)
