"""What settings of the batch attach to a run's windows, loaded where it is asked for; and mixed GPUs are told."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distaccum.tools.accelerators import tell_mixed

if TYPE_CHECKING:
    from distaccum.accumulation.accumulator import Accumulator
    from distaccum.train.components import TrainingComponents


def attached(components: TrainingComponents, accumulator: Accumulator) -> Accumulator:
    """The accumulator of a run, before its first window and before a checkpoint is restored.

    Raises:
        ConfigError: the run cannot have what is asked for; on every rank.
    """
    tell_mixed(accumulator.world)
    if components.config.batch.noise:
        from distaccum.tools.noise import of_run  # noqa: PLC0415

        of_run(components, accumulator)
    if components.config.batch.scales:
        from distaccum.tools.growth import Growth  # noqa: PLC0415

        accumulator.engine.hooks.add(Growth(components, accumulator))
    return accumulator
