"""What an elastic run cannot do, found before there is a process group."""

from __future__ import annotations

import torch

from distaccum.config.engine import FSDP2Config
from distaccum.engines.context import EngineContext
from distaccum.errors import ConfigError

_START = "or start it with launch/train.sh, which goes on from its last checkpoint"


def check(context: EngineContext) -> None:
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
