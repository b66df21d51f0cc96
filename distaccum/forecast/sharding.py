"""What of an engine the arithmetic knows: what it shards, when and how it reduces and gathers, in which formats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from distaccum.config.engine import DDPConfig, DeepSpeedConfig, FSDP2Config, Zero1Config
from distaccum.config.precision import PrecisionConfig
from distaccum.errors import ConfigError

OPTIMIZER_STAGE, GRADIENT_STAGE, PARAMETER_STAGE = 1, 2, 3  # of ZeRO, from which on it is sharded
FULL, HALF = 4, 2  # bytes an element
ADAM = 2 * FULL  # two moments


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """An engine.

    ``stage``: of ZeRO; ``every``: it reduces at each micro-step; ``scatters``: by a reduce-scatter, else by an
    all-reduce; ``spread``: the collective that gives everyone the stepped parameters; ``overlaps``: it reduces while
    the backward goes on; ``bucket_cap_mb``: in buckets of so many MiB, else in one or by blocks; ``whole_again``: also
    what is not in a block is gathered twice a micro-step; ``held``: what is gathered stays for the window;
    ``replicas``: of the shards.
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

    @classmethod
    def of(cls, settings: object) -> Sharding:
        """That of an engine's settings.

        Raises:
            ConfigError: the arithmetic does not know the engine.
        """
        make = _SHARDINGS.get(type(settings))
        if make is None:
            known = ", ".join(kind.__name__ for kind in _SHARDINGS)
            problem = f"{type(settings).__name__} is not one that can be planned"
            raise ConfigError("engine", getattr(settings, "name", None), problem, f"Plan one of {known}")
        return make(settings)

    def parts(self, stage: int, ranks: int) -> int:
        """Into how many parts it shards, among ``ranks``, what ZeRO shards from ``stage`` on."""
        return ranks // self.replicas if self.stage >= stage else 1

    def check(self, ranks: int) -> None:
        """Raises ConfigError where so many ranks cannot be split into the replicas."""
        if ranks % self.replicas:
            problem = f"{ranks} ranks are not a multiple of it"
            raise ConfigError("engine.replicas", self.replicas, problem, "Use a divisor of nodes x gpus")


def _replicated(settings: DDPConfig) -> Sharding:
    return Sharding(stage=0, bucket_cap_mb=settings.bucket_cap_mb)


def _optimizer_sharded(settings: Zero1Config) -> Sharding:
    return Sharding(stage=OPTIMIZER_STAGE, bucket_cap_mb=settings.bucket_cap_mb, spread="broadcast")


def _sharded(settings: FSDP2Config) -> Sharding:
    return Sharding(
        stage=PARAMETER_STAGE,
        scatters=True,
        every=settings.sync == "every",
        held=not settings.reshard_after_forward,
        replicas=settings.replicas,
    )


def _by_the_paper(settings: DeepSpeedConfig) -> Sharding:
    between = OPTIMIZER_STAGE <= settings.stage <= GRADIENT_STAGE
    return Sharding(
        stage=settings.stage,
        scatters=settings.stage > 0,
        spread="all-gather" if between else None,
        overlaps=False,
        whole_again=True,
    )


_SHARDINGS: dict[type, Callable[[Any], Sharding]] = {
    DDPConfig: _replicated,
    Zero1Config: _optimizer_sharded,
    FSDP2Config: _sharded,
    DeepSpeedConfig: _by_the_paper,
}


@dataclass(frozen=True, kw_only=True)
class Formats:
    """Bytes an element of what is held and sent. ``copies``: fp32 weights beside the parameters, sharded as the
    optimizer's state is; ``moments``: that state."""

    parameters: int = FULL
    copies: int = 0
    gradients: int = FULL
    moments: float = ADAM
    reduced: int = FULL
    gathered: int = FULL

    @classmethod
    def of(cls, settings: object, precision: PrecisionConfig, moments: float = ADAM) -> Formats:
        """Those of an engine in a precision, with an optimizer whose state has ``moments`` bytes an element."""
        reduced = FULL if precision.reduce_dtype == "fp32" else HALF
        special = _FORMATS.get(type(settings), _all_fp32)
        return replace(special(settings, precision), moments=moments, reduced=reduced)


def _all_fp32(_: object, __: PrecisionConfig) -> Formats:
    return Formats()


def _of_shards(settings: FSDP2Config, precision: PrecisionConfig) -> Formats:
    everywhere = precision.name in _CASTS and not (precision.keep_fp32 or precision.only)
    return Formats(gathered=HALF if everywhere and settings.gather_dtype == "compute" else FULL)


def _of_cast_models(settings: DeepSpeedConfig, precision: PrecisionConfig) -> Formats:
    casts = precision.name in _CASTS
    cast = HALF if casts else FULL
    return Formats(
        parameters=cast,
        gathered=cast,
        gradients=FULL if settings.stage else cast,
        copies=FULL if casts or settings.stage else 0,
    )


_CASTS = ("bf16", "fp16")
_FORMATS: dict[type, Callable[[Any, PrecisionConfig], Formats]] = {
    FSDP2Config: _of_shards,
    DeepSpeedConfig: _of_cast_models,
}
