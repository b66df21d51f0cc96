"""The watchdog of a run, from its settings."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta

from distaccum.config.durations import seconds_of
from distaccum.config.schema import TrainerConfig
from distaccum.distributed.watchdog import Watchdog
from distaccum.distributed.world import World
from distaccum.train.run_dir import RunDir


def group_timeout(config: TrainerConfig) -> timedelta:
    """After which a collective gives up."""
    return timedelta(seconds=seconds_of("trainer.group_timeout", config.group_timeout))


def watchdog(
    config: TrainerConfig, world: World, run_dir: RunDir, told: Callable[[], str]
) -> AbstractContextManager[object]:
    """Watches this rank within the block, unless ``trainer.hang_timeout`` is null.

    ``told`` gives the signal by which the run was told to leave, if any.
    """
    if config.hang_timeout is None:
        return nullcontext()
    return Watchdog(
        world,
        timeout=None if config.hang_timeout == "auto" else seconds_of("trainer.hang_timeout", config.hang_timeout),
        group_timeout=group_timeout(config),
        on_hang=run_dir.write_failure,
        folder=run_dir.path / "hang",
        told=told,
    )
