"""What cannot be elastic, refused before the run begins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from distaccum.accumulation.schedulers import has_two_weights
from distaccum.config.checks import ROLLBACK, seconds_of
from distaccum.config.schema import RunConfig
from distaccum.config.trainer import ElasticConfig
from distaccum.data.plan.stream import StreamPlan
from distaccum.errors import ConfigError
from distaccum.train.components import TrainingComponents

_OTHERWISE = "or start it with launch/train.sh, which goes on from its last checkpoint"


def adapted(components: TrainingComponents) -> TrainingComponents:
    """The components of an elastic run: training waits for saves, of which each rank writes a part.

    Raises:
        ConfigError: they have what cannot be carried from one set of ranks to another.
    """
    _check(components)
    waits = replace(components.config.checkpoint, background=False)
    return replace(components, config=replace(components.config, checkpoint=waits))


def expect_told(config: ElasticConfig, told: Mapping[str, Any]) -> None:
    """Raises ConfigError where the agents have not ``told`` what is configured: they read their command line alone."""
    own = {
        "min_ranks": config.min_ranks,
        "rejoin": config.rejoin,
        "expel_after": seconds_of("elastic.expel_after", config.expel_after),
    }
    for key, value in told.items():
        if own[key] != value:
            problem = f"and the job was started with {value}: its agents read their command line, and no file"
            raise ConfigError(f"elastic.{key}", getattr(config, key), problem, f"Write elastic.{key}=... there, too")


def _check(components: TrainingComponents) -> None:
    config: RunConfig = components.config
    if components.device.type != "cpu":
        problem = "an elastic run computes on CPUs, over gloo, which can be left at any moment"
        remedy = f"Hide the GPUs with CUDA_VISIBLE_DEVICES='', {_OTHERWISE}"
        raise ConfigError("device", components.device, problem, remedy)
    refused: dict[str, tuple[Any, str]] = {}
    if isinstance(components.plan, StreamPlan):
        refused["data"] = type(components.data.train).__name__, "a stream's position is its rank's own"
    if config.batch.rehearses:
        refused["batch.micro_size"] = "auto", "it is found by all ranks together, and these change"
    if config.metrics.windows:
        refused["metrics.windows"] = True, "a rank that is lost takes its digests with it"
    if config.trainer.on_spike == ROLLBACK:
        refused["trainer.on_spike"] = ROLLBACK, "it goes back to a checkpoint, and survivors to their memory"
    if config.profile.steps is not None:
        refused["profile.steps"] = config.profile.steps, "windows are counted anew where ranks change"
    two = [type(one).__name__ for one in components.optimizers if has_two_weights(one)]
    if two:
        refused["optimizer"] = two[0], "its train() and eval() round the weights between two windows"
    for key, (value, why) in refused.items():
        raise ConfigError(key, value, f"not in an elastic run: {why}", f"Leave it out, {_OTHERWISE}")
