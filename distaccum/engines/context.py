"""The checked settings that an engine is made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from distaccum.config.compile import CompileConfig
from distaccum.config.engine import EngineConfig
from distaccum.config.precision import PrecisionConfig
from distaccum.engines.numerics import Numerics
from distaccum.engines.optimizer_step import StepOptions
from distaccum.precision.loss_scale import LossScale
from distaccum.precision.policy import PrecisionPolicy

if TYPE_CHECKING:
    from distaccum.distributed.world import World
    from distaccum.engines.base import Engine


class EngineBuilder(Protocol):
    """Makes engines in the place of the factory, for runs that need more of them."""

    def check(self, context: EngineContext) -> None:
        """Raises ConfigError for settings that it cannot follow."""

    def create(self, model: nn.Module, optimizers: Sequence[Optimizer], world: World, context: EngineContext) -> Engine:
        """Wraps a model that was checked; a collective."""


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
        numerics: how far sums may depend on the ranks.
        builder: what makes the engine in the factory's place; None: the factory.
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
    numerics: Numerics = field(default_factory=Numerics)
    builder: EngineBuilder | None = None
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
