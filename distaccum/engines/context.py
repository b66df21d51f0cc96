"""The checked settings that an engine is made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any

import torch

from distaccum.config.compile import CompileConfig
from distaccum.config.engine import EngineConfig
from distaccum.config.precision import PrecisionConfig
from distaccum.engines.optimizer_step import StepOptions
from distaccum.precision.loss_scale import LossScale
from distaccum.precision.policy import PrecisionPolicy


@dataclass(frozen=True, kw_only=True)
class EngineContext:
    """A run's checked settings for its engine; ``factory.prepare`` makes it.

    Args:
        engine: the engine's settings.
        precision: the precision's settings.
        policy: the policy made from ``precision``.
        clip_norm: largest norm of the global gradient; None: no clipping by norm.
        clip_value: largest absolute value of its elements; None: no clipping by value.
        global_batch_size, micro_batch_size: where they are known, for engines that state them in their own
            configuration.
        world_size: number of ranks.
        device: this rank's.
        seed: of weights that the engine makes.
        planned: True where the processes are not launched yet.
        compile: what of the model is compiled.
        reproducible: whether gradients are summed in an order that does not depend on the ranks.
        elastic: whether a window goes on where ranks are lost.
        keepers: then, by rank, which one keeps a copy of a share of the state; empty: the next one.
        generated: the engine's own configuration, as its check generated it; empty for most.
    """

    engine: EngineConfig
    precision: PrecisionConfig
    policy: PrecisionPolicy
    clip_norm: float | None
    clip_value: float | None
    global_batch_size: int | None
    micro_batch_size: int | None
    world_size: int
    device: torch.device
    seed: int
    planned: bool
    compile: CompileConfig = field(default_factory=CompileConfig)
    reproducible: bool = False
    elastic: bool = False
    keepers: Sequence[int] = ()
    generated: Mapping[str, Any] = field(default_factory=dict)

    @property
    def micro_steps(self) -> int | None:
        """Of a full window, where the sizes are known: ranks' shares differ by one sample at most."""
        if self.global_batch_size is None or self.micro_batch_size is None:
            return None
        return ceil(ceil(self.global_batch_size / self.world_size) / self.micro_batch_size)

    def step_options(self, device: torch.device) -> StepOptions:
        """How gradients that lie on ``device`` are stepped on."""
        return StepOptions(
            clip_norm=self.clip_norm,
            clip_value=self.clip_value,
            scaler=self.loss_scale(device),
            underflow_every=self.precision.underflow_every,
        )

    def loss_scale(self, device: torch.device) -> LossScale | None:
        """The loss scale, where gradients pass through fp16."""
        return LossScale.of(self.precision.scaler, device) if self.policy.scales_loss else None
