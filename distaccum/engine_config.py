"""The settings of ``conf/engine/``: one frozen dataclass an engine, so that each has its own keys and no other's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from distaccum.checks import require, require_choice, require_count, require_positive
from distaccum.errors import ConfigError

SYNCS = ("boundary", "every")
ACTIVATION_CHECKPOINTS = ("none", "blocks", "selective")
GATHER_DTYPES = ("compute", "fp32")
STAGES = (0, 1, 2, 3)
BY_PARAMETER = "kept by parameter name"
"""The format of optimizer state that all engines but DeepSpeed read and write, at any world size."""


@dataclass(frozen=True, kw_only=True)
class DDPConfig:
    """Everything replicated; gradients all-reduced in buckets.

    ``bucket_cap_mb`` (MiB) bounds one reduction; ``find_unused_parameters`` lets parts of the model sit a step out.
    """

    name: str = "ddp"
    bucket_cap_mb: float = 25.0
    find_unused_parameters: bool = False

    def __post_init__(self) -> None:
        require_positive("engine.bucket_cap_mb", self.bucket_cap_mb)

    def optimizer_format(self, _: int) -> str:
        """Which checkpoints' optimizer state the engine can go on from, on so many ranks."""
        return BY_PARAMETER


@dataclass(frozen=True, kw_only=True)
class Zero1Config(DDPConfig):
    """As ``ddp``, with the optimizer's state on one rank each."""

    name: str = "zero1"


@dataclass(frozen=True, kw_only=True)
class FSDP2Config:
    """Parameters, gradients and optimizer state sharded, block by block.

    ``sync``: reduce gradients at the window's ``boundary``, and hold them whole until then; or after ``every``
    micro-step, and hold shards. ``reshard_after_forward``: free a block's gathered parameters after its forward, and
    gather them once more for the backward. ``gather_dtype``: parameters travel in the format that the forward computes
    in (``compute``) or in ``fp32``. ``activation_checkpoint``: recompute in the backward what ``blocks`` computed; or
    all of it but the matrix products (``selective``). ``offload``: keep the shards on the CPU. ``replicas``: groups of
    ranks that hold the same shards; the ranks of one share a model. ``blocks``: globs of the modules to shard one by
    one; by default a model's own blocks. ``meta_init``: build the model on the meta device, and make its weights block
    by block.
    """

    name: str = "fsdp2"
    sync: str = "boundary"
    reshard_after_forward: bool = True
    gather_dtype: str = "compute"
    activation_checkpoint: str = "none"
    offload: bool = False
    replicas: int = 1
    blocks: list[str] = field(default_factory=list)
    meta_init: bool = False

    def __post_init__(self) -> None:
        require_choice("engine.sync", self.sync, SYNCS)
        require_choice("engine.gather_dtype", self.gather_dtype, GATHER_DTYPES)
        require_choice("engine.activation_checkpoint", self.activation_checkpoint, ACTIVATION_CHECKPOINTS)
        require_count("engine.replicas", self.replicas, least=1)

    def optimizer_format(self, _: int) -> str:
        """See ``DDPConfig``."""
        return BY_PARAMETER


@dataclass(frozen=True, kw_only=True)
class DeepSpeedConfig:
    """DeepSpeed's ZeRO at ``stage`` 0 to 3, its JSON generated from the whole configuration.

    ``offload_optimizer`` (stages 2, 3) and ``offload_parameters`` (stage 3): keep these on the CPU. ``json``: a file or
    mapping in DeepSpeed's own format: what distaccum does not set itself is passed on.
    """

    name: str = "deepspeed"
    stage: int = 2
    offload_optimizer: bool = False
    offload_parameters: bool = False
    json: Any = None

    def __post_init__(self) -> None:
        require(self.stage in STAGES, "engine.stage", self.stage, "no such ZeRO stage", "Use 0, 1, 2 or 3")

    def optimizer_format(self, world_size: int) -> str:
        """See ``DDPConfig``: DeepSpeed's own, cut for a stage and a number of ranks."""
        return f"in DeepSpeed's files, for ZeRO stage {self.stage} on {world_size} ranks"


EngineConfig = DDPConfig | Zero1Config | FSDP2Config | DeepSpeedConfig
ENGINES: dict[str, type[EngineConfig]] = {
    "ddp": DDPConfig,
    "zero1": Zero1Config,
    "fsdp2": FSDP2Config,
    "deepspeed": DeepSpeedConfig,
}


def engine_config(engine: str | EngineConfig) -> EngineConfig:
    """The settings of an engine that is given by name, or as they are.

    Raises:
        ConfigError: no engine has that name.
    """
    return settings_of(engine)() if isinstance(engine, str) else engine


def settings_of(name: object) -> type[EngineConfig]:
    """The dataclass of an engine's settings.

    Raises:
        ConfigError: no engine has that name.
    """
    require_choice("engine", name, tuple(ENGINES))
    if not isinstance(name, str):
        raise ConfigError("engine", name, "not a name", f"Use one of {', '.join(ENGINES)}")
    return ENGINES[name]
