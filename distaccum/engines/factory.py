"""How each engine is made of the settings, and what can be checked of these before there is a process group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from inspect import Parameter, signature
from math import ceil
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from distaccum.config.engine import DeepSpeedConfig, EngineConfig, engine_config
from distaccum.config.precision import PrecisionConfig
from distaccum.distributed.world import World
from distaccum.engines.base import Engine
from distaccum.engines.ddp import DDPEngine
from distaccum.engines.deepspeed.compat import (
    check_dimensions,
    check_fp16,
    check_known_bugs,
    check_values,
    load_deepspeed,
)
from distaccum.engines.deepspeed.config.generate import generate
from distaccum.engines.deepspeed.engine import DeepSpeedEngine
from distaccum.engines.fsdp2 import checks as fsdp2_checks
from distaccum.engines.fsdp2 import engine as fsdp2
from distaccum.engines.zero1 import ZeRO1
from distaccum.errors import ConfigError
from distaccum.precision import hardware
from distaccum.precision.policy import PrecisionPolicy
from distaccum.precision.scaler import LossScaler
from distaccum.precision.selection import check_compiled, check_globs, check_parameters

_LARGEST_BUCKET = 500_000_000  # elements: DeepSpeed's own default


@dataclass(frozen=True, kw_only=True)
class EngineContext:
    """What an engine may want to know of a run."""

    engine: EngineConfig
    precision: PrecisionConfig
    clip_norm: float | None
    clip_value: float | None
    global_batch_size: int | None
    micro_batch_size: int | None
    world_size: int
    device: torch.device
    seed: int = 0  # of weights that the engine makes
    planned: bool = False  # the processes are yet to be launched

    @property
    def options(self) -> dict[str, Any]:
        """The engine's own."""
        options = asdict(self.engine)
        del options["name"]
        return options

    @property
    def micro_steps(self) -> int | None:
        """Of a full window, where the sizes are known: ranks' shares differ by one sample at most."""
        if self.global_batch_size is None or self.micro_batch_size is None:
            return None
        return ceil(ceil(self.global_batch_size / self.world_size) / self.micro_batch_size)

    def common(self, policy: PrecisionPolicy, device: torch.device) -> dict[str, Any]:
        """What the engines of our own take besides."""
        scaler = _scaler(self.precision, device) if policy.scales_loss else None
        return {
            "policy": policy,
            "scaler": scaler,
            "underflow_every": self.precision.underflow_every,
            "clip_norm": self.clip_norm,
            "clip_value": self.clip_value,
        }


Make = Callable[[nn.Module, Sequence[Optimizer], World, PrecisionPolicy, EngineContext], Engine]


def _anything(settings: EngineContext, model: nn.Module) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """One engine: ``make`` is a collective; ``check`` raises ConfigError for what ``make`` would fail on."""

    make: Make
    check: Callable[[EngineContext, nn.Module], None] = _anything
    makes_weights: bool = False  # of a model on the meta device


def _scaler(precision: PrecisionConfig, device: torch.device) -> LossScaler:
    config = precision.scaler
    options = asdict(config)
    del options["initial_scale_power"]
    static = options.pop("static_scale")
    return LossScaler(device, init_scale=config.initial_scale, dynamic=static is None, **options)


def _replicated(
    model: nn.Module, optimizers: Sequence[Optimizer], world: World, policy: PrecisionPolicy, settings: EngineContext
) -> Engine:
    return DDPEngine(model, optimizers, world, **settings.common(policy, world.device), **settings.options)


def _optimizer_sharded(
    model: nn.Module, optimizers: Sequence[Optimizer], world: World, policy: PrecisionPolicy, settings: EngineContext
) -> Engine:
    shards = ZeRO1(world)
    options = settings.common(policy, world.device) | settings.options
    return DDPEngine(model, optimizers, world, shards=shards, **options)


def _sharded(
    model: nn.Module, optimizers: Sequence[Optimizer], world: World, policy: PrecisionPolicy, settings: EngineContext
) -> Engine:
    # Where shards are kept on the CPU, so are their gradients, and what decides about these.
    device = torch.device("cpu") if settings.options["offload"] else world.device
    options = settings.common(policy, device) | settings.options
    del options["meta_init"]  # is for whoever builds the model
    return fsdp2.FSDP2Engine(model, optimizers, world, seed=settings.seed, **options)


def _check_sharded(settings: EngineContext, model: nn.Module) -> None:
    policy = PrecisionPolicy.of(settings.precision)
    fsdp2.check(settings.world_size, replicas=settings.options["replicas"], reduce_dtype=policy.reduce_dtype)
    fsdp2_checks.check_meta(model, meta_init=settings.options["meta_init"])
    fsdp2_checks.check_globs(model, settings.options["blocks"])
    fsdp2_checks.check_parameters(model, settings.options["blocks"])


def _deepspeed_json(settings: EngineContext) -> dict[str, Any]:
    assert isinstance(settings.engine, DeepSpeedConfig)
    return generate(
        settings.engine,
        settings.precision,
        clip_norm=settings.clip_norm,
        clip_value=settings.clip_value,
        global_batch_size=settings.global_batch_size,
        micro_batch_size=settings.micro_batch_size,
        micro_steps=settings.micro_steps,
        world_size=settings.world_size,
    )


def _check_deepspeed(settings: EngineContext, model: nn.Module) -> None:
    check_dimensions(model)
    found, policy = _deepspeed_json(settings), PrecisionPolicy.of(settings.precision)
    deepspeed = load_deepspeed(settings.device, planned=settings.planned)
    check_known_bugs(found, deepspeed.__version__, settings.device.type)
    check_values(found)
    if policy.compute_dtype is torch.float16:
        check_fp16(deepspeed, settings.device)


def _deepspeed(
    model: nn.Module, optimizers: Sequence[Optimizer], world: World, policy: PrecisionPolicy, settings: EngineContext
) -> Engine:
    scaler = _scaler(settings.precision, world.device) if policy.scales_loss else None
    found = _deepspeed_json(settings)
    # By default 500 million elements, which stage 3 sets aside, however small the model.
    elements = sum(parameter.numel() for parameter in model.parameters())
    found["zero_optimization"].setdefault("reduce_bucket_size", min(_LARGEST_BUCKET, elements))
    return DeepSpeedEngine(model, optimizers, world, settings=found, policy=policy, scaler=scaler)


REPLICATED = EngineSpec(make=_replicated)
OPTIMIZER_SHARDED = EngineSpec(make=_optimizer_sharded)
SHARDED = EngineSpec(make=_sharded, check=_check_sharded, makes_weights=True)
DEEPSPEED = EngineSpec(make=_deepspeed, check=_check_deepspeed)

_ENGINES = {"ddp": REPLICATED, "zero1": OPTIMIZER_SHARDED, "fsdp2": SHARDED, "deepspeed": DEEPSPEED}


def create_engine(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    world: World,
    *,
    engine: str | EngineConfig = "ddp",
    precision: str | PrecisionConfig = "fp32",
    clip_norm: float | None = None,
    clip_value: float | None = None,
    global_batch_size: int | None = None,
    micro_batch_size: int | None = None,
    seed: int = 0,
) -> Engine:
    """The engine around a model: its ``micro_step(sync=...)`` toggles the gradient reduction; a collective.

    Args:
        model: moved to this rank's device; every trained parameter in fp32, or on the meta device where the engine can
            make weights.
        optimizer: over its parameters; or several, over disjoint sets of them.
        world: this rank.
        engine: by name or with settings.
        precision: the policy, by name or with settings; ``engine.autocast()`` goes around forward and loss.
        clip_norm: largest norm of the global gradient.
        clip_value: instead, largest absolute value of its elements.
        global_batch_size, micro_batch_size: for engines that state them in their own configuration.
        seed: of the weights of a model on the meta device.

    Raises:
        ConfigError: no such engine or policy; an optimizer over parameters that are not the model's, whose gradients
            nobody would reduce, or that are another optimizer's; or the model or the hardware cannot do what engine and
            precision ask for.
    """
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    engine, precision = engine_config(engine), PrecisionConfig.of(precision)
    _check_optimizers(model, optimizers)
    if clip_norm is not None and clip_value is not None:
        raise ConfigError("clip_value", clip_value, f"and clip_norm={clip_norm} too", "Give one of them")
    policy = PrecisionPolicy.of(precision)
    settings = EngineContext(
        engine=engine,
        precision=precision,
        clip_norm=clip_norm,
        clip_value=clip_value,
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        world_size=world.size,
        device=world.device,
        seed=seed,
    )
    check_model(model, policy, world.device, settings)
    if world.is_main:
        hardware.warn(policy, world.device)
    hardware.configure(policy, world.device)
    return _ENGINES[engine.name].make(model, optimizers, world, policy, settings)


def _check_optimizers(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    free = {id(parameter) for parameter in model.parameters()}
    for optimizer in optimizers:
        closure = signature(type(optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is Parameter.empty:
            problem = "its step wants a closure, to run the window again at will"
            raise ConfigError("optimizer", type(optimizer).__name__, problem, "Use one that steps on the gradients")
        held = [id(p) for group in optimizer.param_groups for p in group["params"]]
        strangers = sum(p not in free for p in held)
        if strangers:
            problem = f"{strangers} of its parameters are not the model's, or another optimizer's too"
            remedy = "Make it from model.parameters(), each in one; join several models in one nn.Module"
            raise ConfigError("optimizer", type(optimizer).__name__, problem, remedy)
        free -= set(held)


def check_model(model: nn.Module, policy: PrecisionPolicy, device: torch.device, settings: EngineContext) -> None:
    """Raises ConfigError where the model, the hardware or the engine cannot do what is asked for."""
    check_parameters(model)
    check_globs(model, policy)
    check_compiled(model, policy)
    hardware.check(policy, device)
    engine = _ENGINES[settings.engine.name]
    if any(parameter.is_meta for parameter in model.parameters()) and not engine.makes_weights:
        able = ", ".join(name for name, entry in _ENGINES.items() if entry.makes_weights)
        remedy = f"Use engine={able}, or build the model where it has memory"
        raise ConfigError("model", type(model).__name__, "its weights are on the meta device", remedy)
    engine.check(settings, model)


def blocks_of(model: nn.Module, engine: EngineConfig) -> list[nn.Module]:
    """The modules that are sharded one by one, inner ones first: those that the settings name, or else the layers.

    Raises:
        ConfigError: a name matches nothing.
    """
    from distaccum.engines.fsdp2 import wrap  # noqa: PLC0415  few need it, and it takes long to import

    return wrap.blocks_of(model, getattr(engine, "blocks", ()))
