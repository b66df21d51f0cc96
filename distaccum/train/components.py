"""Composition root: the only file that turns names in the configuration into engines, models, sources and sinks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn
from torch.optim import Optimizer

from distaccum.accumulation.tracker import Schedule
from distaccum.checkpoint import weights
from distaccum.config.instantiate import build
from distaccum.config.schema import Node, RunConfig
from distaccum.data.adapters import to_data_spec
from distaccum.data.factory import check_workers, make_plan
from distaccum.data.plan.batch import CONFIG_KEYS, Plan
from distaccum.data.plan.stream import StreamPlan
from distaccum.data.spec import DataSpec
from distaccum.engines.factory import EngineContext, check_model
from distaccum.errors import ConfigError
from distaccum.losses.base import Loss
from distaccum.precision.policy import PrecisionPolicy
from distaccum.train.callbacks import Callback
from distaccum.train.evaluate import EvaluationMetric
from distaccum.train.metrics.loggers import ConsoleLogger, JsonlLogger, Logger
from distaccum.train.metrics.wandb import WandbLogger
from distaccum.train.optimizer import build_optimizer
from distaccum.train.run_dir import RunDir


@dataclass(frozen=True, kw_only=True)
class TrainingComponents:
    """All that can be built, and can fail for the user's reasons, before there is a process group."""

    config: RunConfig
    source: DataSpec
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


def components_from_config(
    config: RunConfig, *, world_size: int, device: torch.device, planned: bool = False
) -> TrainingComponents:
    """Raises ConfigError for whatever in the configuration cannot be built on this machine.

    ``planned``: the processes are yet to be launched.
    """
    source = as_source_node(config.data)
    torch.manual_seed(config.seed)
    with torch.device("meta") if getattr(config.engine, "meta_init", False) else nullcontext():
        model = build("model", config.model)
    loss = build("loss", config.loss)
    return build_components(config, source, model, loss, world_size=world_size, device=device, planned=planned)


def build_components(
    config: RunConfig,
    source: DataSpec,
    model: nn.Module,
    loss: Loss,
    *,
    world_size: int,
    device: torch.device,
    optimizers: Sequence[Optimizer] = (),
    callbacks: Sequence[Callback] = (),
    metrics: Mapping[str, EvaluationMetric] | None = None,
    planned: bool = False,
) -> TrainingComponents:
    """The parts around a model, a loss and data that are there already; the rest is the configuration's.

    Raises:
        ConfigError: as :func:`components_from_config`.
    """
    batch = config.batch
    plan = make_plan(
        source,
        global_batch_size=batch.global_size,
        tokens=batch.tokens,
        micro_batch_size=batch.micro_size,
        world_size=world_size,
        seed=config.seed,
        names=CONFIG_KEYS,
    )
    check_workers(source, plan, config.trainer.num_workers)
    if source.eval_dataset is not None and not len(source.eval_dataset):
        raise ConfigError("data", source.description, "holds out an empty set", "Hold out more, or nothing")
    if metrics and source.eval_dataset is not None and len(source.eval_dataset) < world_size:
        problem = (
            f"holds out {len(source.eval_dataset)} samples for {world_size} ranks: a metric needs one on every rank"
        )
        raise ConfigError("data", source.description, problem, "Hold out more samples, or leave metrics out")
    if batch.group_by_length and source.lengths is None:
        remedy = "Give lengths to its Source: the tokens of each training sample"
        raise ConfigError("batch.group_by_length", True, "the data does not say how long its samples are", remedy)
    if not isinstance(model, nn.Module):
        raise ConfigError("model", type(model).__name__, "not a torch.nn.Module", "Name one as model._target_")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError("model", type(model).__name__, "has no parameter to train", "Unfreeze some of it")
    policy = PrecisionPolicy.of(config.precision)
    settings = EngineContext(
        engine=config.engine,
        precision=config.precision,
        clip_norm=config.optim.clip_norm,
        clip_value=config.optim.clip_value,
        global_batch_size=batch.global_size,
        micro_batch_size=batch.micro_size,
        world_size=world_size,
        device=device,
        planned=planned,
    )
    check_model(model, policy, device, settings)
    if config.init_from is not None:
        weights.check(model, Path(config.init_from))
    total_steps = _total_steps(config, plan)
    return TrainingComponents(
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


def build_loggers(
    parts: TrainingComponents, run_dir: RunDir, console: Console, *, wandb_id: str, about: Mapping[str, Any]
) -> list[Logger]:
    """The sinks of rank 0; ``about`` is shown with the W&B run."""
    metrics = parts.config.metrics
    loggers: list[Logger] = [JsonlLogger(run_dir.metrics)]
    if metrics.console:
        loggers.append(ConsoleLogger(parts.total_steps, console))
    if metrics.wandb.mode != "disabled":
        loggers.append(WandbLogger(run_dir.path, **asdict(metrics.wandb), run_id=wandb_id, config=about))
    return loggers


def as_source_node(node: Node) -> DataSpec:
    """Builds ``data``: a Source, or any map-style dataset."""
    data = build("data", node)
    try:
        return to_data_spec(data)
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
