"""The settings of ``conf/engine/``: one frozen dataclass an engine, so that each has its own keys and no other's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from os import PathLike
from typing import Any, ClassVar

from distaccum.config.checks import AUTO, require, require_annotated, require_choice, require_positive, take_digits
from distaccum.config.precision import PrecisionConfig
from distaccum.errors import ConfigError, near_misses

SYNCS = ("boundary", "every")
ACTIVATION_CHECKPOINTS = ("none", "blocks", "selective")
GATHER_DTYPES = ("compute", "fp32")
STAGES = (0, 1, 2, 3)
_PARAMETER_STAGE = 3  # of ZeRO, from which on parameters are sharded
BY_PARAMETER = "kept by parameter name"
"""The format of optimizer state that all engines read and write, at any world size."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The base of an engine's settings.

    An engine is one subclass here, listed in ``ENGINES``; one line in ``engines/factory.py``; what a forecast knows of
    it in ``tools/plan/sharding.py``; and ``conf/engine/NAME.yaml``.

    Args:
        activation_checkpoint (none | blocks | selective): Recompute activations in the backward to save memory: those
            of ``blocks``, or all but matrix products (``selective``).
        blocks: Names of the modules that are recomputed, and with fsdp2 sharded, one by one, such as ``[encoder.*]``.
            Empty: the model's own blocks.
    """

    name: str = ""
    activation_checkpoint: str = "none"
    blocks: list[str] = field(default_factory=list)
    over_gloo: ClassVar[bool] = True
    """Whether a GPU's tensors may go over gloo between ranks."""
    goes_back: ClassVar[bool] = False
    """Whether an elastic run goes back to a checkpoint in memory where a rank is lost, and not on with its window."""
    multiplies_fp8: ClassVar[bool] = True
    """Whether linear layers may compute in fp8."""

    def __post_init__(self) -> None:
        require_annotated("engine", self)
        own = type(self).name
        require(self.name == own, "engine.name", self.name, f"this is {type(self).__name__}", "Leave it out")
        require_choice("engine.activation_checkpoint", self.activation_checkpoint, ACTIVATION_CHECKPOINTS)

    def holds_weights(self, precision: PrecisionConfig) -> bool:
        """Whether the model's parameters are the weights that the optimizer steps: whole, or as this rank's shards."""
        return not precision.keeps_masters


@dataclass(frozen=True, kw_only=True)
class DDPConfig(EngineConfig):
    """Everything replicated; gradients all-reduced in buckets.

    Args:
        bucket_cap_mb: Size of an all-reduce bucket in MiB.
        find_unused_parameters: Allow parameters that a step does not use; the optimizer leaves them unchanged.
    """

    name: str = "ddp"
    bucket_cap_mb: float = 25.0
    find_unused_parameters: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive("engine.bucket_cap_mb", self.bucket_cap_mb)


@dataclass(frozen=True, kw_only=True)
class Zero1Config(DDPConfig):
    """As ``ddp``, with the optimizer state of each parameter on one rank."""

    name: str = "zero1"
    multiplies_fp8: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class FSDP2Config(EngineConfig):
    """Parameters, gradients and optimizer state sharded, block by block.

    Args:
        sync (boundary | every): When gradients are reduced: once per step, holding whole gradients until then
            (``boundary``), or in every micro-step, holding shards (``every``: less memory, more traffic).
        reshard_after_forward: Free a block's gathered parameters after its forward, and gather them again.
        gather_dtype (compute | fp32): Number format of gathered parameters: the forward's, or ``fp32``.
        offload: Keep the shards in CPU memory.
        replicas (int | auto): Number of model replicas. With 2 on 16 ranks, each model is sharded over 8. ``auto``: one
            on each node, as the launcher says; in a forecast ``cluster.nodes``.
        meta_init: Build the model without memory and initialize its weights block by block.
    """

    name: str = "fsdp2"
    goes_back: ClassVar[bool] = True
    sync: str = "boundary"
    reshard_after_forward: bool = True
    gather_dtype: str = "compute"
    offload: bool = False
    replicas: Any = 1  # a number once an engine is prepared
    meta_init: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("engine.sync", self.sync, SYNCS)
        require_choice("engine.gather_dtype", self.gather_dtype, GATHER_DTYPES)
        take_digits(self, "replicas")
        given = self.replicas
        fits = given == AUTO if isinstance(given, str) else type(given) is int and given >= 1
        problem, remedy = "is no number of replicas", "Use a whole number from 1, or auto"
        require(fits, "engine.replicas", given, problem, remedy)

    def holds_weights(self, precision: PrecisionConfig) -> bool:
        """See ``EngineConfig``: the shards are fp32, whatever is gathered."""
        return True


@dataclass(frozen=True, kw_only=True)
class DeepSpeedConfig(EngineConfig):
    """DeepSpeed's ZeRO, its JSON generated from the whole configuration.

    Args:
        stage (0 | 1 | 2 | 3): ZeRO stage: 1 shards the optimizer state, 2 also gradients, 3 also parameters.
        offload_optimizer: Keep optimizer state in CPU memory (stages 2 and 3).
        offload_parameters: Keep parameters in CPU memory (stage 3).
        json (path | mapping | null): More settings in DeepSpeed's own format: a file or a mapping. Keys that distaccum
            sets itself must agree.
    """

    name: str = "deepspeed"
    multiplies_fp8: ClassVar[bool] = False
    over_gloo: ClassVar[bool] = False  # it asks its accelerator for the backend, which is NCCL's on a GPU
    goes_back: ClassVar[bool] = True
    stage: int = 2
    offload_optimizer: bool = False
    offload_parameters: bool = False
    json: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.stage in STAGES, "engine.stage", self.stage, "no such ZeRO stage", "Use 0, 1, 2 or 3")
        fits = self.stage < _PARAMETER_STAGE or self.activation_checkpoint != "selective"
        problem, remedy = "DeepSpeed's stage 3 computes a block otherwise the second time", "Use blocks, or stage 2"
        require(fits, "engine.activation_checkpoint", self.activation_checkpoint, problem, remedy)
        given = self.json is None or isinstance(self.json, str | PathLike | Mapping)
        require(given, "engine.json", self.json, "neither a file nor a mapping", "Give the path of a JSON file")

    def holds_weights(self, precision: PrecisionConfig) -> bool:
        """See ``EngineConfig``."""
        return self.stage < _PARAMETER_STAGE and not precision.casts


ENGINES: dict[str, type[EngineConfig]] = {
    kind.name: kind for kind in (DDPConfig, Zero1Config, FSDP2Config, DeepSpeedConfig)
}


def engine_config(engine: object) -> EngineConfig:
    """The settings of an engine that is given by name, or as they are.

    Raises:
        ConfigError: it is neither, or no engine has that name.
    """
    if isinstance(engine, str):
        return settings_of(engine)()
    for kind in ENGINES.values():
        if isinstance(engine, kind):
            return engine
    kinds = ", ".join(kind.__name__ for kind in ENGINES.values())
    remedy = f"Use one of {', '.join(ENGINES)}, or settings: {kinds} of distaccum.config.engine, called"
    raise ConfigError("engine", engine, f"neither a name nor settings but {type(engine).__name__}", remedy)


def unknown_setting(engine: str, path: str, value: object) -> ConfigError:
    """For ``engine.PATH``, which ``engine`` has not: with the engines that have it, or those spelled nearly so."""
    key, head = f"engine.{path}", path.split(".", maxsplit=1)[0]
    known = {name: [one.name for one in fields(ENGINES[name]) if one.name != "name"] for name in ENGINES}
    own = known.get(engine, [])
    others = " or ".join(name for name, names in known.items() if head in names)
    if head in own:
        return ConfigError(key, value, f"engine.{head} is one value", f"Give all of it as engine.{head}=...")
    if others:
        problem = f"a setting of engine={others}, not of engine={engine}"
        return ConfigError(key, value, problem, f"Use engine={others}, or leave it out")
    problem = f"no such setting of engine={engine}{near_misses(head, own)}"
    return ConfigError(key, value, problem, f"It takes {', '.join(own)}")


def settings_of(name: object) -> type[EngineConfig]:
    """The dataclass of an engine's settings.

    Raises:
        ConfigError: no engine has that name.
    """
    require_choice("engine", name, tuple(ENGINES))
    if not isinstance(name, str):
        raise ConfigError("engine", name, "not a name", f"Use one of {', '.join(ENGINES)}")
    return ENGINES[name]
