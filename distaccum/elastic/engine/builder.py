"""Makes the engines of an elastic run, and refuses what such a run cannot do before there is a process group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from distaccum.config.engine import FSDP2Config, Zero1Config
from distaccum.distributed.world import World
from distaccum.engines.base import Engine
from distaccum.engines.context import EngineContext
from distaccum.engines.factory import create_plain
from distaccum.errors import ConfigError

_START = "or start it with launch/train.sh, which goes on from its last checkpoint"


@dataclass(frozen=True)
class ElasticEngines:
    """Engines whose windows go on where ranks are lost; where an engine cannot, a run goes back instead.

    Args:
        keepers: by rank, which one keeps a copy of its share of the state; empty: the next one.
    """

    keepers: Sequence[int] = ()

    def check(self, context: EngineContext) -> None:
        """Raises ConfigError for settings with which a run cannot go on without some of its ranks."""
        engine = context.engine
        if isinstance(engine, FSDP2Config) and engine.replicas > 1:
            problem = "in an elastic run the number of ranks changes, and may be none that replicas divide"
            raise ConfigError("engine.replicas", engine.replicas, problem, f"Use engine.replicas=1, {_START}")
        if context.policy.reduce_dtype is not torch.float32:
            problem = "in an elastic run gradients travel in fp32"
            raise ConfigError("precision.reduce_dtype", context.policy.reduce_dtype, problem, "Use fp32")
        if context.compile.compiles:
            problem = "in an elastic run, whose model is wrapped anew where ranks are lost and compiled for each"
            raise ConfigError("compile", context.compile.name, problem, f"Use compile=none, {_START}")

    def create(self, model: nn.Module, optimizers: Sequence[Optimizer], world: World, context: EngineContext) -> Engine:
        """Wraps a model that was checked; a collective."""
        if context.engine.goes_back:
            return create_plain(model, optimizers, world, context)
        # With them comes DistributedDataParallel.
        from distaccum.elastic.engine.ddp import ElasticDDPEngine, MirroredZeRO1  # noqa: PLC0415
        from distaccum.elastic.engine.tree import KeptTree  # noqa: PLC0415

        return ElasticDDPEngine(
            model,
            optimizers,
            world,
            context,
            tree=KeptTree(world, by_units=context.numerics.fixed_order),
            mirrored=MirroredZeRO1(world) if isinstance(context.engine, Zero1Config) else None,
            keepers=self.keepers,
        )
