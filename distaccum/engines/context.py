"""The checked settings that an engine is made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from distaccum.config.checks import require_positive_number, whole_number
from distaccum.config.compile import CompileConfig
from distaccum.config.engine import EngineConfig
from distaccum.config.precision import PrecisionConfig
from distaccum.engines.numerics import Numerics
from distaccum.engines.optimizer_step import StepOptions
from distaccum.errors import ConfigError
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
    """A run's settings for its engine; ``factory.prepare`` checks them against the model.

    Args:
        engine: the engine's settings.
        precision: the precision's settings.
        world_size: number of ranks.
        device: this rank's.
        clip_norm: largest norm of the global gradient; None: no clipping by norm.
        clip_value: largest absolute value of its elements; None: no clipping by value.
        global_batch_size, micro_batch_size: where they are known, for engines that state them in their own
            configuration.
        seed: of weights that the engine makes.
        planned: True where the processes are not launched yet.
        compile: what of the model is compiled.
        numerics: how far sums may depend on the ranks.
        builder: what makes the engine in the factory's place; None: the factory.
        generated: the engine's own configuration, as its check generated it; empty for most.

    Raises:
        ConfigError: a number that is none, or both ways to clip.
    """

    engine: EngineConfig
    precision: PrecisionConfig
    world_size: int
    device: torch.device
    clip_norm: float | None = None
    clip_value: float | None = None
    global_batch_size: int | None = None
    micro_batch_size: int | None = None
    seed: int = 0
    planned: bool = False
    compile: CompileConfig = field(default_factory=CompileConfig)
    numerics: Numerics = field(default_factory=Numerics)
    builder: EngineBuilder | None = None
    generated: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.clip_norm is not None and self.clip_value is not None:
            problem = f"and clip_norm={self.clip_norm} too"
            raise ConfigError("clip_value", self.clip_value, problem, "Give one of them")
        require_positive_number("clip_norm", self.clip_norm)
        require_positive_number("clip_value", self.clip_value)
        for key in ("global_batch_size", "micro_batch_size", "seed"):
            if (value := getattr(self, key)) is not None:
                whole_number(key, value)

    @cached_property
    def policy(self) -> PrecisionPolicy:
        """The number formats that :attr:`precision` describes."""
        return PrecisionPolicy.of(self.precision)

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
