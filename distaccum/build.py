"""Composition root: the only file that turns names in the configuration into engines, models, sources and sinks."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_type_hints

import torch
from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate
from rich.console import Console
from torch import nn
from torch.optim import Optimizer

from distaccum.batch_plan import Plan
from distaccum.callbacks import Callback
from distaccum.config import EngineConfig, Node, RunConfig
from distaccum.data.adopt import as_source
from distaccum.data.feeds import check_workers, make_plan
from distaccum.data.source import Source
from distaccum.engines.base import Engine
from distaccum.engines.ddp import DDPEngine
from distaccum.errors import ConfigError, near_misses
from distaccum.evaluate import EvaluationMetric
from distaccum.loss import Loss
from distaccum.metrics.sinks import ConsoleSink, JsonlSink, Sink
from distaccum.metrics.wandb_sink import WandbSink
from distaccum.precision.policy import POLICIES, PrecisionPolicy
from distaccum.run_dir import RunDir
from distaccum.schedule import Schedule
from distaccum.stream_plan import StreamPlan
from distaccum.world import World

_ENGINES = {"ddp": DDPEngine}


@dataclass(frozen=True, kw_only=True)
class Parts:
    """All that can be built, and can fail for the user's reasons, before there is a process group."""

    config: RunConfig
    source: Source
    plan: Plan | StreamPlan
    model: nn.Module
    loss: Loss
    optimizer: Optimizer
    schedule: Schedule
    callbacks: Sequence[Callback]
    metrics: Mapping[str, EvaluationMetric]
    policy: PrecisionPolicy
    device: torch.device
    total_steps: int


def build_parts(config: RunConfig, *, world_size: int, device: torch.device) -> Parts:
    """Raises ConfigError for whatever in the configuration cannot be built on this machine."""
    source = as_source_node(config.data)
    torch.manual_seed(config.seed)
    return assemble(
        config, source, build("model", config.model), build("loss", config.loss), world_size=world_size, device=device
    )


def assemble(
    config: RunConfig, source: Source, model: nn.Module, loss: Loss, *, world_size: int, device: torch.device,
    optimizer: Optimizer | None = None, callbacks: Sequence[Callback] = (),
    metrics: Mapping[str, EvaluationMetric] | None = None,
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
    model.to(device)
    total_steps = _total_steps(config, plan)
    if optimizer is None:
        optimizer = build("optim.optimizer", config.optim.optimizer, model.parameters(), lr=config.optim.lr)
    return Parts(
        config=config,
        source=source,
        plan=plan,
        model=model,
        loss=loss,
        optimizer=optimizer,
        schedule=build("schedule", config.schedule, total_steps=total_steps),
        callbacks=[*callbacks, *(build(f"callbacks.{name}", node) for name, node in config.callbacks.items())],
        metrics=metrics or {},
        policy=POLICIES[config.precision.name],
        device=device,
        total_steps=total_steps,
    )


def wrap(model: nn.Module, optimizer: Optimizer, world: World, config: EngineConfig) -> Engine:
    """The engine that trains ``model``, which is moved to this rank's device; a collective.

    Raises:
        ConfigError: the optimizer holds parameters that are not the model's, whose gradients nobody would reduce.
    """
    own = {id(parameter) for parameter in model.parameters()}
    strangers = sum(id(p) not in own for group in optimizer.param_groups for p in group["params"])
    if strangers:
        problem = f"{strangers} of its parameters are not the model's"
        remedy = "Make it from model.parameters(); join several models in one nn.Module"
        raise ConfigError("optimizer", type(optimizer).__name__, problem, remedy)
    options = asdict(config)
    return _ENGINES[options.pop("name")](model.to(world.device), optimizer, world, **options)


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


def build(key: str, node: Node, *positional: Any, **extra: Any) -> Any:
    """Calls the node's ``_target_`` with the rest of the node.

    Args:
        key: the node's dotted name, for error messages.
        node: ``_target_`` and keyword arguments.
        positional: arguments that go first.
        extra: further keyword arguments.

    Raises:
        ConfigError: no such target, an argument that it does not take or of another type than it declares, or an
            error that it raises itself.
    """
    if "_target_" not in node:
        raise ConfigError(
            f"{key}._target_", None, "is missing", "Name the class or function to call, as package.module.Name"
        )
    target = node["_target_"]
    try:
        function = get_object(target)
    except (ImportError, ValueError, AttributeError) as error:
        remedy = "Give package.module.Name, importable from where you start the run (see PYTHONPATH)"
        raise ConfigError(f"{key}._target_", target, f"cannot be imported ({error})", remedy) from error
    _check_arguments(key, node, function)
    try:
        return instantiate(node, *positional, **extra, _convert_="all")
    except InstantiationException as error:
        cause = error.__cause__
        if isinstance(cause, ConfigError):
            raise cause from None
        cause = cause or error
        raise ConfigError(key, target, f"{type(cause).__name__}: {cause}", "Correct its arguments") from error


def _check_arguments(key: str, node: Node, function: Any) -> None:
    """Refuses what a signature tells beforehand: unknown arguments, and plain numbers of the wrong type."""
    try:
        parameters = inspect.signature(function).parameters
        hints = get_type_hints(function.__init__ if inspect.isclass(function) else function)
    except (TypeError, ValueError, NameError):
        return  # a target without a readable signature checks its arguments itself
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for name, value in node.items():
        if name.startswith("_") and name.endswith("_"):
            continue
        if name not in parameters and not open_ended:
            remedy = f"It takes {', '.join(parameters)}"
            raise ConfigError(f"{key}.{name}", value, f"no such argument{near_misses(name, parameters)}", remedy)
        expected = hints.get(name)
        if expected in (int, float) and not _is_number(value, expected):
            raise ConfigError(f"{key}.{name}", value, f"not of type {expected.__name__}", "Give a number of that type")


def _is_number(value: Any, expected: type) -> bool:
    if isinstance(value, bool):
        return False
    return isinstance(value, int) or (expected is float and isinstance(value, float))


def _total_steps(config: RunConfig, plan: Plan | StreamPlan) -> int:
    steps, epochs = config.trainer.max_steps, config.trainer.max_epochs
    if isinstance(plan, StreamPlan):
        if steps is None:
            remedy = "State it: the schedule needs the end, and nobody knows how long a stream is"
            raise ConfigError("trainer.max_steps", "null", "the data is a stream", remedy)
        return steps
    return min(limit for limit in (steps, None if epochs is None else plan.updates(epochs)) if limit is not None)
