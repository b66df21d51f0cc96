"""The registry of engines, and how one is made: settings checked before there is a process group, then wrapped.

An engine's module is imported when that engine is prepared or made: FSDP2's and DeepSpeed's take seconds.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer, SparseAdam

from distaccum.config.checks import AUTO, GLOO, require
from distaccum.config.compile import CompileConfig
from distaccum.config.engine import DDPConfig, DeepSpeedConfig, EngineConfig, FSDP2Config, Zero1Config, engine_config
from distaccum.config.precision import PrecisionConfig
from distaccum.distributed.world import World
from distaccum.engines.base import Engine
from distaccum.engines.context import EngineContext
from distaccum.engines.modules import is_meta, is_sharded, trained
from distaccum.engines.numerics import Numerics
from distaccum.engines.ownership import Ownership
from distaccum.errors import ON_ALL_RANKS, ConfigError, shorten
from distaccum.precision.selection import check_compiled, check_globs, check_parameters

if TYPE_CHECKING:
    from distaccum.engines.activation_checkpoint import Checkpoints

# What no engine can train: models that are wrapped already, odd types, optimizers of sparse gradients.

# By name, since their modules take long to import: where each class's module begins, and what to do.
_UNWRAP = "delete the line that wraps it, or give what is inside (.module): the engine wraps it"
_UNSHARD = (
    "delete the line that shards it: engine=fsdp2 does. What an Accumulator has sharded stays so after close(): build "
    "the model anew, and load its weights"
)
_WRAPPERS = {
    "DistributedDataParallel": ("torch.nn.parallel.", _UNWRAP),
    "DataParallel": ("torch.nn.parallel.", _UNWRAP),
    "FullyShardedDataParallel": ("torch.distributed.", _UNSHARD),
    "FSDPModule": ("torch.distributed.", _UNSHARD),
    "ReplicateModule": ("torch.distributed.", "delete the line that calls replicate(): engine=ddp does it"),
    "DeepSpeedEngine": ("deepspeed.", "delete deepspeed.initialize(), or give what is inside (.module)"),
}
_TRAINABLE = (torch.float32, torch.float64, torch.complex64, torch.complex128)


def check_wrappers(model: nn.Module) -> None:
    """A model that reduces or shards its own gradients would do so twice.

    Raises:
        ConfigError: it or a module in it is torch's or DeepSpeed's wrapper, or a parameter of it is sharded.
    """
    for name, module in model.named_modules():
        for base in type(module).__mro__:
            origin, remedy = _WRAPPERS.get(base.__name__, ("", ""))
            if origin and base.__module__.startswith(origin):
                part = f"its {name}" if name else "it"
                problem = f"{part} is in {base.__name__} already, and gradients would be reduced twice"
                raise ConfigError("model", type(model).__name__, problem, remedy[0].upper() + remedy[1:])
    sharded = [name for name, parameter in model.named_parameters() if is_sharded(parameter)]
    if sharded:
        problem = f"its parameters {shorten(sharded)} are sharded over ranks already (DTensor)"
        remedy = "Delete what shards them: engine=fsdp2 does. Tensor parallelism is not supported"
        raise ConfigError("model", type(model).__name__, problem, remedy)


def check_dtypes(model: nn.Module) -> None:
    """Parameters that are stepped must be of a type that torch's optimizers and collectives compute in.

    Raises:
        ConfigError: a trainable parameter is of another type.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype not in _TRAINABLE:
            problem = f"its parameter {name} is {str(parameter.dtype).removeprefix('torch.')}, which cannot be trained"
            remedy = "Keep it in float32, or freeze it (requires_grad=False) before"
            raise ConfigError("model", type(model).__name__, problem, remedy)


def check_sparse(optimizer: Optimizer) -> None:
    """Gradients are dense on every engine, also those of an ``nn.Embedding(sparse=True)``.

    Raises:
        ConfigError: the optimizer takes sparse gradients only.
    """
    if isinstance(optimizer, SparseAdam):
        problem = "it takes sparse gradients only, and all gradients are dense here"
        raise ConfigError("optimizer", type(optimizer).__name__, problem, "Use torch.optim.Adam, Adagrad or SGD")


_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """One engine, by where its functions are: ``module:function`` below ``distaccum.engines``.

    Args:
        config: the engine's settings.
        create: ``(model, optimizers, world, context) -> Engine``; a collective.
        check: ``(model, context) -> Mapping | None``: raises ConfigError for what ``create`` would fail on; what it
            returns becomes ``context.generated``. None: nothing to check.
        makes_weights: of a model on the meta device.
        keeps_tensors: whether a module's weights stay whole tensors of the model's own type, in fp32.
    """

    config: type[EngineConfig]
    create: str
    check: str | None = None
    makes_weights: bool = False
    keeps_tensors: bool = False


_SPECS = (
    EngineSpec(config=DDPConfig, create="ddp.engine:create", check="ddp.engine:check", keeps_tensors=True),
    EngineSpec(config=Zero1Config, create="ddp.engine:create_zero1", check="ddp.engine:check", keeps_tensors=True),
    EngineSpec(config=FSDP2Config, create="fsdp2.engine:FSDP2Engine", check="fsdp2.checks:check", makes_weights=True),
    EngineSpec(config=DeepSpeedConfig, create="deepspeed.engine:DeepSpeedEngine", check="deepspeed.compat:check"),
)
SPECS = {spec.config.name: spec for spec in _SPECS}


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
    compile: str | CompileConfig = "none",  # noqa: A002  torch's own word
    numerics: str | Numerics = "fast",
) -> Engine:
    """The engine around a model: its ``micro_step(sync=...)`` toggles the gradient reduction; a collective.

    Args:
        model: moved to the rank's device; trained parameters in fp32, or on the meta device where the engine can do so.
        optimizer: over its parameters; or several, over disjoint sets of them.
        world: this rank.
        engine: by name or with settings.
        precision: the policy, by name or with settings; ``engine.autocast()`` goes around forward and loss.
        clip_norm: largest norm of the global gradient.
        clip_value: instead, largest absolute value of its elements.
        global_batch_size: for engines that state it in their own configuration, in samples.
        micro_batch_size: for the same.
        seed: of the weights of a model on the meta device.
        compile: nothing (``none``), each of its ``blocks``, or the ``model``; or settings.
        numerics: ``fast``, or ``reproducible``: the same bits on any number of ranks, of windows dealt by units.

    Raises:
        ConfigError: no such engine or policy; an optimizer over parameters that are not the model's, whose gradients
            nobody would reduce, or that are another optimizer's; or the model or the hardware cannot do what engine and
            precision ask for.
    """
    context = EngineContext(
        engine=engine_config(engine),
        precision=PrecisionConfig.of(precision),
        clip_norm=clip_norm,
        clip_value=clip_value,
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        world_size=world.size,
        device=world.device,
        seed=seed,
        compile=CompileConfig.of(compile),
        numerics=Numerics.of(numerics),
    )
    return create(prepare(model, context), model, optimizer, world)


def prepare(model: nn.Module, context: EngineContext) -> EngineContext:
    """The first half of :func:`create_engine`, which needs no process group: settings, checked against the model.

    Raises:
        ConfigError: the model or the hardware cannot do what they ask for.
    """
    context = replace(context, precision=_with_that_of(model, context.precision))
    if getattr(context.engine, "replicas", 1) == AUTO:
        from distaccum.program import REPLICAS, load  # noqa: PLC0415  where it is asked for

        context = replace(context, engine=load(REPLICAS)(context))
    return replace(context, generated=check_engine(model, context))


def _with_that_of(model: nn.Module, precision: PrecisionConfig) -> PrecisionConfig:
    """With the format that a module ``rounds_to`` by itself, where none is stated.

    Raises:
        ConfigError: another one is.
    """
    for module in model.modules():
        if own := getattr(module, "rounds_to", None):
            problem = f"and {type(module).__name__} rounds to {own} by itself"
            holds = precision.name in (PrecisionConfig.name, own)
            require(holds, "precision", precision.name, problem, f"Use precision={own}, or leave it out")
            precision = replace(precision, name=own)
    return precision


def create(
    context: EngineContext, model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], world: World
) -> Engine:
    """The second half of :func:`create_engine`: wraps the model that ``context`` was prepared for; a collective.

    Raises:
        ConfigError: an optimizer that the engine cannot step, or another number of ranks than was prepared for.
        MisuseError: another engine that is not closed has the model or an optimizer.
    """
    if context.planned or context.world_size != world.size:
        problem = f"the model was prepared for {context.world_size}"
        remedy = "Open the process group before the Trainer is made, or start with torchrun"
        raise ConfigError("world size", world.size, problem, remedy)
    if world.device.type != "cpu" and world.backend == GLOO:
        refuse_gloo(context.engine, world.device, key="backend")
    from distaccum.precision import hardware  # noqa: PLC0415  where an engine is made
    from distaccum.program import ALIASES, FP8, load  # noqa: PLC0415  where an engine is made

    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    ownership, checkpoints, aliases = Ownership(model, optimizers), None, load(ALIASES)(model)
    fp8 = load(FP8)(model, context)
    try:
        _check_optimizers(model, optimizers)
        if world.is_main:
            hardware.warn(context.policy, world.device)
        hardware.configure(context.policy, world.device)
        fp8.convert()
        parts = _parts_to_compile(model, context)
        checkpoints = checkpoint_activations(model, context.engine, compiled=bool(parts))
        build = create_plain if context.builder is None else context.builder.create
        made = build(model, optimizers, world, context)
        aliases.expect_kept(made)
    except BaseException:
        if checkpoints is not None:
            checkpoints.undo()
        fp8.undo()
        ownership.release()
        raise
    ownership.add(parameter for parameter in made.unwrapped_model.parameters() if parameter.requires_grad)
    made.on_close(partial(ownership.release, keeps_optimizers=not made.facts.gives_optimizers_back))
    made.on_close(fp8.undo)
    if checkpoints is not None:
        made.probe.activation_checkpoints = checkpoints
        made.on_close(checkpoints.undo)
    if parts:
        from distaccum.engines import compiled  # noqa: PLC0415  where a model is compiled

        made.compiled = compiled.Compiled(parts, context.compile, tells=world.is_main)
    return made


def create_plain(model: nn.Module, optimizers: Sequence[Optimizer], world: World, context: EngineContext) -> Engine:
    """The engine that the settings name, without what belongs to all engines: the part that a builder may replace."""
    made: Engine = _load(SPECS[context.engine.name].create)(model, optimizers, world, context)
    return made


def refuse_gloo(engine: EngineConfig, device: torch.device, *, key: str) -> None:
    """Refuses an engine that cannot send a GPU's tensors over gloo; ``key`` is the setting that asks for gloo.

    Raises:
        ConfigError: it is such an engine, on a GPU.
    """
    fits = engine.over_gloo or device.type == "cpu"
    able = ", ".join(spec.config.name for spec in _SPECS if spec.config.over_gloo)
    problem = f"engine={engine.name} sends a GPU's tensors over NCCL alone"
    require(fits, key, GLOO, problem, f"Use one GPU a rank and {key}=nccl, or engine={able}")


def _parts_to_compile(model: nn.Module, context: EngineContext) -> list[nn.Module]:
    """Of a model that is not wrapped yet; none where nothing is compiled."""
    if not context.compile.compiles:
        return []
    from distaccum.engines.blocks import blocks_of, innermost  # noqa: PLC0415  where a model is compiled

    if context.compile.name == "model":
        return [model]
    named, key = context.compile.blocks, "compile.blocks"
    return innermost(blocks_of(model, named, key=key) if named else blocks_of(model, context.engine.blocks))


def check_engine(model: nn.Module, context: EngineContext) -> Mapping[str, Any]:
    """The engine's own configuration, as its check generates it; empty for most.

    Raises:
        ConfigError: the model, the hardware or the engine cannot do what is asked for.
    """
    from distaccum.precision import hardware  # noqa: PLC0415  where an engine is made
    from distaccum.program import CHECK_FP8, STEPPED, load  # noqa: PLC0415  where an engine is made

    check_wrappers(model)
    check_parameters(model)
    check_dtypes(model)
    load(STEPPED)(model)
    _check_variables(model, context)
    check_globs(model, context.policy)
    load(CHECK_FP8)(model, context)
    check_compiled(model, context.policy)
    context.numerics.check(model, context)
    if context.builder is not None:
        context.builder.check(context)
    hardware.check(context.policy, hardware.gpu_of(context.device))
    spec = SPECS[context.engine.name]
    if is_meta(model) and not spec.makes_weights:
        able = ", ".join(name for name, other in SPECS.items() if other.makes_weights)
        remedy = f"Use engine={able}, or build the model where it has memory"
        raise ConfigError("model", type(model).__name__, "its weights are on the meta device", remedy)
    if context.compile.compiles:
        from distaccum.engines import compiled  # noqa: PLC0415

        parts = _parts_to_compile(model, context)
        compiled.check(model, parts, context)
    _recomputed(model, context.engine)
    generated = _load(spec.check)(model, context) if spec.check else None
    return generated or {}


def _check_variables(model: nn.Module, context: EngineContext) -> None:
    """Refuses what a module that ``computes_with_variables`` of its own cannot follow."""
    found = [type(one).__name__ for one in model.modules() if getattr(one, "computes_with_variables", False)]
    if not found:
        return
    if not SPECS[context.engine.name].keeps_tensors:
        able = " or ".join(name for name, other in SPECS.items() if other.keeps_tensors)
        problem = f"puts other tensors in the place of weights, and {found[0]} computes with variables of its own"
        raise ConfigError("engine", context.engine.name, problem, f"Use engine={able}")
    if context.policy.keeps_masters:
        problem = f"and {found[0]} computes with variables of its own, which have a format of their own"
        raise ConfigError("precision", context.policy.name, problem, "Use precision=bf16")
    if context.compile.compiles:
        problem = f"and {found[0]} computes with variables of its own, which are in no graph of torch's"
        raise ConfigError("compile", context.compile.name, problem, "Use compile=none")


def _load(entry: str) -> Any:
    return resolve_name(f"distaccum.engines.{entry}")


def _check_optimizers(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    from distaccum.program import STEP_FAULT, load  # noqa: PLC0415  where an engine is made

    free = {id(parameter) for parameter in model.parameters()}
    every = set(free)
    for optimizer in optimizers:
        check_sparse(optimizer)
        if fault := load(STEP_FAULT)(optimizer):
            problem = f"its step alone raises {fault}"
            remedy = "Use one that steps on the gradients, without a closure that runs the window again"
            raise ConfigError("optimizer", type(optimizer).__name__, problem, remedy)
        held = [id(p) for group in optimizer.param_groups for p in group["params"]]
        twice = len(held) - len(set(held))
        if twice:
            problem = f"{twice} of its parameters stand in it twice, and would be stepped twice"
            raise ConfigError("optimizer", type(optimizer).__name__, problem, "Give each once")
        strangers = sum(p not in free for p in held)
        if strangers:
            problem = f"{strangers} of its parameters are not the model's, or another optimizer's too"
            remedy = "Make it from model.parameters(), each in one; join several models in one nn.Module"
            raise ConfigError("optimizer", type(optimizer).__name__, problem, remedy)
        free -= set(held)
    left = [name for name, parameter in trained(model).items() if id(parameter) in free]
    if left and free != every:
        problem = "no optimizer holds, though they need a gradient: they stay as they are, and count in its norm"
        text = "%s: %s. Give them to an optimizer, or freeze them: requires_grad_(False)"
        _log.warning(text, shorten(left), problem, extra=ON_ALL_RANKS)


def checkpoint_activations(model: nn.Module, engine: EngineConfig, *, compiled: bool = False) -> Checkpoints | None:
    """Has a model that is not wrapped yet recompute in the backward what the settings say.

    Raises:
        ConfigError: a name of a block matches nothing, or the model has no blocks.
    """
    if not (blocks := _recomputed(model, engine)):
        return None
    from distaccum.engines.activation_checkpoint import Checkpoints  # noqa: PLC0415  where a model asks for it

    return Checkpoints(model, blocks, selective=engine.activation_checkpoint == "selective", compiled=compiled)


def _recomputed(model: nn.Module, engine: EngineConfig) -> list[nn.Module]:
    how = engine.activation_checkpoint
    if how == "none":
        return []
    from distaccum.engines.blocks import blocks_of  # noqa: PLC0415  where a model asks for it

    blocks = blocks_of(model, engine.blocks)
    if not blocks:
        problem = f"{type(model).__name__} has no list of layers that train"
        raise ConfigError("engine.activation_checkpoint", how, problem, "Name its blocks: engine.blocks=[layer*]")
    return blocks
