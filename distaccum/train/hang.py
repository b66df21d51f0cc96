"""The watchdog of a run, from its settings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from distaccum.config.durations import seconds_of
from distaccum.config.schema import TrainerConfig
from distaccum.distributed.signals import StopSignals
from distaccum.distributed.watchdog import Watchdog
from distaccum.distributed.world import World
from distaccum.train.run_dir import RunDir


def group_timeout(config: TrainerConfig) -> timedelta:
    """After which a collective gives up."""
    return timedelta(seconds=seconds_of("trainer.group_timeout", config.group_timeout))


@contextmanager
def watchdog(config: TrainerConfig, world: World, run_dir: RunDir, signals: StopSignals) -> Iterator[None]:
    """Watches this rank within the block, unless ``trainer.hang_timeout`` is null; a second Ctrl-C says why it ends."""
    signals.last_words = lambda reason: run_dir.write_failure(f"rank {world.rank}: {reason}")
    try:
        if config.hang_timeout is None:
            yield
            return
        with Watchdog(
            world,
            timeout=None if config.hang_timeout == "auto" else seconds_of("trainer.hang_timeout", config.hang_timeout),
            group_timeout=group_timeout(config),
            on_hang=run_dir.write_failure,
            folder=run_dir.path / "hang",
            told=lambda: signals.told,
        ):
            yield
    finally:
        signals.last_words = None
