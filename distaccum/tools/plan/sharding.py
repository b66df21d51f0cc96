"""What the arithmetic of a forecast knows of an engine: what it shards, when it communicates, in which formats."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import singledispatch

from distaccum.config.engine import DDPConfig, DeepSpeedConfig, EngineConfig, FSDP2Config, Zero1Config
from distaccum.config.precision import PrecisionConfig
from distaccum.errors import ConfigError

OPTIMIZER_STAGE, GRADIENT_STAGE, PARAMETER_STAGE = 1, 2, 3  # of ZeRO, from which on it is sharded
FULL, HALF = 4, 2  # bytes an element
ADAM = 2 * FULL  # two moments


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """What an engine shards, and which collectives it runs.

    Args:
        stage: of ZeRO: what is sharded.
        every: gradients are reduced at each micro-step.
        scatters: gradients are reduced by a reduce-scatter, else by an all-reduce.
        spread: the collective that gives every rank the stepped parameters.
        overlaps: the reduction runs during the backward.
        bucket_cap_mb: MiB of one reduction; None: one reduction in all, or one a block.
        whole_again: what is in no block is gathered twice a micro-step, too.
        held: gathered parameters stay for the window.
        replicas: of the shards.
        owners: a tensor that its rule needs whole is stepped by one rank.
    """

    stage: int
    every: bool = False
    scatters: bool = False
    spread: str | None = None
    overlaps: bool = True
    bucket_cap_mb: float | None = None
    whole_again: bool = False
    held: bool = False
    replicas: int = 1
    owners: bool = False

    def parts(self, stage: int, ranks: int) -> int:
        """How many parts, among ``ranks``, there are of what ZeRO shards from ``stage`` on."""
        return ranks // self.replicas if self.stage >= stage else 1

    def check(self, ranks: int) -> None:
        """Raises ConfigError where ``ranks`` cannot be split into the replicas."""
        if ranks % self.replicas:
            problem = f"{ranks} ranks are not a multiple of it"
            raise ConfigError("engine.replicas", self.replicas, problem, "Use a divisor of nodes x gpus")


@dataclass(frozen=True, kw_only=True)
class Formats:
    """Bytes an element of what is held and sent.

    Args:
        parameters: what the forward computes from, of those that are trained.
        frozen: the same of those that are not.
        copies: fp32 weights in addition to the parameters, sharded as the optimizer state is.
        gradients: what the window accumulates.
        moments: the optimizer state.
        reduced: gradients on their way between ranks.
        gathered: parameters on their way between ranks.
    """

    parameters: int = FULL
    frozen: int = FULL
    copies: int = 0
    gradients: int = FULL
    moments: float = ADAM
    reduced: int = FULL
    gathered: int = FULL


@singledispatch
def sharding_of(engine: EngineConfig) -> Sharding:
    """What an engine of these settings shards."""
    raise LookupError(f"a forecast knows nothing of {type(engine).__name__}")


@sharding_of.register
def _(engine: DDPConfig) -> Sharding:
    return Sharding(stage=0, bucket_cap_mb=engine.bucket_cap_mb)


@sharding_of.register
def _(engine: Zero1Config) -> Sharding:
    return Sharding(stage=OPTIMIZER_STAGE, bucket_cap_mb=engine.bucket_cap_mb, spread="broadcast")


@sharding_of.register
def _(engine: FSDP2Config) -> Sharding:
    return Sharding(
        stage=PARAMETER_STAGE,
        scatters=True,
        every=engine.sync == "every",
        held=not engine.reshard_after_forward,
        replicas=engine.replicas,
        owners=True,
    )


@sharding_of.register
def _(engine: DeepSpeedConfig) -> Sharding:
    """By the ZeRO paper."""
    between = OPTIMIZER_STAGE <= engine.stage <= GRADIENT_STAGE
    return Sharding(
        stage=engine.stage,
        scatters=engine.stage > 0,
        spread="all-gather" if between else None,
        overlaps=False,
        whole_again=True,
    )


def formats_of(engine: EngineConfig, precision: PrecisionConfig, moments: float = ADAM) -> Formats:
    """Bytes an element in a precision, with an optimizer that keeps ``moments`` bytes an element."""
    reduced = FULL if precision.reduce_dtype == "fp32" else HALF
    return replace(_held(engine, precision), moments=moments, reduced=reduced)


@singledispatch
def _held(engine: EngineConfig, _: PrecisionConfig) -> Formats:
    raise LookupError(f"a forecast knows nothing of {type(engine).__name__}")


@_held.register
def _(engine: DDPConfig, precision: PrecisionConfig) -> Formats:
    return Formats(parameters=HALF, gathered=HALF, copies=FULL) if precision.keeps_masters else Formats()


@_held.register
def _(engine: FSDP2Config, precision: PrecisionConfig) -> Formats:
    everywhere = precision.casts and not (precision.keep_fp32 or precision.only)
    return Formats(gathered=HALF if everywhere and engine.gather_dtype == "compute" else FULL)


@_held.register
def _(engine: DeepSpeedConfig, precision: PrecisionConfig) -> Formats:
    cast = HALF if precision.casts else FULL
    return Formats(
        parameters=cast,
        frozen=cast,
        gathered=cast,
        gradients=FULL if engine.stage else cast,
        copies=FULL if precision.casts or engine.stage else 0,
    )
