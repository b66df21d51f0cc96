"""Composition root: the only file that turns names in the configuration into engines, models, sources and sinks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn
from torch.optim import Optimizer

from distaccum.batch_plan import Plan
from distaccum.callbacks import Callback
from distaccum.checkpoint import weights
from distaccum.config import Node, RunConfig
from distaccum.data.adopt import as_source
from distaccum.data.feeds import check_workers, make_plan
from distaccum.data.source import Source
from distaccum.engine_config import EngineConfig
from distaccum.engines.base import Engine
from distaccum.engines.entries import DEEPSPEED, OPTIMIZER_SHARDED, REPLICATED, SHARDED, EngineSettings
from distaccum.errors import ConfigError
from distaccum.evaluate import EvaluationMetric
from distaccum.loss import Loss
from distaccum.metrics.sinks import ConsoleSink, JsonlSink, Sink
from distaccum.metrics.wandb_sink import WandbSink
from distaccum.nodes import build
from distaccum.optim import build_optimizer
from distaccum.precision import hardware
from distaccum.precision.modules import check_compiled, check_globs, check_parameters
from distaccum.precision.policy import PrecisionPolicy
from distaccum.precision_config import PrecisionConfig
from distaccum.run_dir import RunDir
from distaccum.schedule import Schedule
from distaccum.stream_plan import StreamPlan
from distaccum.world import World

_ENGINES = {"ddp": REPLICATED, "zero1": OPTIMIZER_SHARDED, "fsdp2": SHARDED, "deepspeed": DEEPSPEED}


@dataclass(frozen=True, kw_only=True)
class Parts:
    """All that can be built, and can fail for the user's reasons, before there is a process group."""

    config: RunConfig
    source: Source
    plan: Plan | StreamPlan
    model: nn.Module
    parameters: int  # of the model as it was before an engine took it
    loss: Loss
    optimizers: Sequence[Optimizer]
    schedule: Schedule
    callbacks: Sequence[Callback]
    metrics: Mapping[str, EvaluationMetric]
    policy: PrecisionPolicy
    device: torch.device
    total_steps: int


def build_parts(config: RunConfig, *, world_size: int, device: torch.device, planned: bool = False) -> Parts:
    """Raises ConfigError for whatever in the configuration cannot be built on this machine.

    ``planned``: the processes are yet to be launched.
    """
    source = as_source_node(config.data)
    torch.manual_seed(config.seed)
    with torch.device("meta") if getattr(config.engine, "meta_init", False) else nullcontext():
        model = build("model", config.model)
    loss = build("loss", config.loss)
    return assemble(config, source, model, loss, world_size=world_size, device=device, planned=planned)


def assemble(
    config: RunConfig, source: Source, model: nn.Module, loss: Loss, *, world_size: int, device: torch.device,
    optimizers: Sequence[Optimizer] = (), callbacks: Sequence[Callback] = (),
    metrics: Mapping[str, EvaluationMetric] | None = None, planned: bool = False,
) -> Parts:  # fmt: skip
    """The parts around a model, a loss and data that are there already; the rest is the configuration's.

    Raises:
        ConfigError: as :func:`build_parts`.
    """
    batch = config.batch
    plan = make_plan(
        source, global_size=batch.global_size, tokens=batch.tokens, micro_size=batch.micro_size,
        world_size=world_size, seed=config.seed,
    )  # fmt: skip
    check_workers(source, plan, config.trainer.num_workers)
    if source.held_out is not None and not len(source.held_out):
        raise ConfigError("data", source.description, "holds out an empty set", "Hold out more, or nothing")
    if metrics and source.held_out is not None and len(source.held_out) < world_size:
        problem = f"holds out {len(source.held_out)} samples for {world_size} ranks: a metric needs one on every rank"
        raise ConfigError("data", source.description, problem, "Hold out more samples, or leave metrics out")
    if batch.group_by_length and source.lengths is None:
        remedy = "Give lengths to its Source: the tokens of each training sample"
        raise ConfigError("batch.group_by_length", True, "the data does not say how long its samples are", remedy)
    if not isinstance(model, nn.Module):
        raise ConfigError("model", type(model).__name__, "not a torch.nn.Module", "Name one as model._target_")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError("model", type(model).__name__, "has no parameter to train", "Unfreeze some of it")
    policy = PrecisionPolicy.of(config.precision)
    settings = EngineSettings(
        engine=config.engine, precision=config.precision, clip_norm=config.optim.clip_norm,
        clip_value=config.optim.clip_value, global_size=batch.global_size, micro_size=batch.micro_size,
        world_size=world_size, device=device, planned=planned,
    )  # fmt: skip
    check_model(model, policy, device, settings)
    if config.init_from is not None:
        weights.check(model, Path(config.init_from))
    total_steps = _total_steps(config, plan)
    return Parts(
        config=config,
        source=source,
        plan=plan,
        model=model,
        parameters=sum(p.numel() for p in model.parameters()),
        loss=loss,
        optimizers=optimizers or [build_optimizer(config.optim, model, device)],
        schedule=build("schedule", config.schedule, total_steps=total_steps),
        callbacks=[*callbacks, *(build(f"callbacks.{name}", node) for name, node in config.callbacks.items())],
        metrics=metrics or {},
        policy=policy,
        device=device,
        total_steps=total_steps,
    )


def wrap(
    model: nn.Module, optimizers: Sequence[Optimizer], world: World, engine: EngineConfig, precision: PrecisionConfig,
    *, clip_norm: float | None, clip_value: float | None, global_size: int | None = None,
    micro_size: int | None = None, seed: int = 0,
) -> Engine:  # fmt: skip
    """The engine that trains ``model``, which moves to this rank's device; a collective.

    Args:
        model: with every trained parameter in fp32, or on the meta device where the engine can make weights.
        optimizers: over its parameters.
        world: this rank.
        engine: which one, and its settings.
        precision: the policy's settings.
        clip_norm, clip_value: of the global gradient.
        global_size, micro_size: where they are known, for engines that want to be told.
        seed: of weights that the engine makes.

    Raises:
        ConfigError: an optimizer holds parameters that are not the model's, whose gradients nobody would reduce, or
            another optimizer's; or the model or the hardware cannot do what engine and precision ask for.
    """
    _check_optimizers(model, optimizers)
    if clip_norm is not None and clip_value is not None:
        raise ConfigError("clip_value", clip_value, f"and clip_norm={clip_norm} too", "Give one of them")
    policy = PrecisionPolicy.of(precision)
    settings = EngineSettings(
        engine=engine, precision=precision, clip_norm=clip_norm, clip_value=clip_value, global_size=global_size,
        micro_size=micro_size, world_size=world.size, device=world.device, seed=seed,
    )  # fmt: skip
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


def check_model(model: nn.Module, policy: PrecisionPolicy, device: torch.device, settings: EngineSettings) -> None:
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


def build_sinks(
    parts: Parts, run_dir: RunDir, console: Console, *, wandb_id: str, about: Mapping[str, Any]
) -> list[Sink]:
    """The sinks of rank 0; ``about`` is shown with the W&B run."""
    metrics = parts.config.metrics
    sinks: list[Sink] = [JsonlSink(run_dir.metrics)]
    if metrics.console:
        sinks.append(ConsoleSink(parts.total_steps, console))
    if metrics.wandb.mode != "disabled":
        sinks.append(WandbSink(run_dir.path, **asdict(metrics.wandb), run_id=wandb_id, config=about))
    return sinks


def as_source_node(node: Node) -> Source:
    """Builds ``data``: a Source, or any map-style dataset."""
    data = build("data", node)
    try:
        return as_source(data)
    except TypeError as error:
        raise ConfigError("data._target_", node["_target_"], str(error), "Return one of these from it") from error


def _total_steps(config: RunConfig, plan: Plan | StreamPlan) -> int:
    steps, epochs = config.trainer.max_steps, config.trainer.max_epochs
    if isinstance(plan, StreamPlan):
        if steps is None:
            remedy = "State it: the schedule needs the end, and nobody knows how long a stream is"
            raise ConfigError("trainer.max_steps", "null", "the data is a stream", remedy)
        return steps
    return min(limit for limit in (steps, None if epochs is None else plan.updates(epochs)) if limit is not None)
