"""Settings of the small runs that many tests train: at a constant rate, with nothing saved, shown or sent unasked."""

from collections.abc import Mapping
from typing import Any

from distaccum.config.schema import RunConfig

CONSTANT = {"_target_": "distaccum.train.schedules.Constant"}
NOTHING: Mapping[str, Any] = {}


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
