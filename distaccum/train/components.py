"""Composition root: turns the names in the configuration into model, data, loss, optimizer, schedule and loggers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
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
from distaccum.engines.context import EngineContext
from distaccum.engines.factory import prepare
from distaccum.errors import ConfigError
from distaccum.losses.base import Loss
from distaccum.precision.policy import PrecisionPolicy
from distaccum.train.callbacks import Callback
from distaccum.train.evaluate import EvaluationMetric
from distaccum.train.metrics.loggers import JsonlLogger, Logger
from distaccum.train.optimizer import build_optimizer
from distaccum.train.run_dir import RunDir

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, kw_only=True)
class TrainingComponents:
    """All that can be built, and can fail for the user's reasons, before there is a process group.

    ``record`` is the configuration as checkpoints and W&B keep it: that of the objects which train. ``parameters`` is
    the number of elements, counted before an engine shards them.
    """

    config: RunConfig
    record: Mapping[str, Any]
    data: DataSpec
    plan: Plan | StreamPlan
    model: nn.Module
    parameters: int
    loss: Loss
    optimizers: Sequence[Optimizer]
    schedule: Schedule
    callbacks: Sequence[Callback]
    metrics: Mapping[str, EvaluationMetric]
    engine: EngineContext
    device: torch.device
    total_steps: int

    @property
    def policy(self) -> PrecisionPolicy:
        """What the model computes in."""
        return self.engine.policy


def components_from_config(
    config: RunConfig, *, world_size: int, device: torch.device, planned: bool = False
) -> TrainingComponents:
    """Builds every component that the configuration names.

    Args:
        config: names model, data and loss too.
        world_size: number of ranks.
        device: of this rank.
        planned: True where the processes are not launched yet.

    Raises:
        ConfigError: something cannot be built on this machine.
    """
    data = build_data(config.data)
    torch.manual_seed(config.seed)
    with torch.device("meta") if getattr(config.engine, "meta_init", False) else nullcontext():
        model = build("model", config.model)
    loss = build("loss", config.loss)
    return build_components(config, data, model, loss, world_size=world_size, device=device, planned=planned)


def build_components(
    config: RunConfig,
    data: DataSpec,
    model: nn.Module,
    loss: Loss,
    *,
    world_size: int,
    device: torch.device,
    optimizers: Sequence[Optimizer] = (),
    callbacks: Sequence[Callback] = (),
    metrics: Mapping[str, EvaluationMetric] | None = None,
    record: Mapping[str, Any] | None = None,
    planned: bool = False,
) -> TrainingComponents:
    """Builds the components around a model, a loss and data that exist; the rest is the configuration's.

    Args:
        config: its ``model``, ``data`` and ``loss`` are not used, nor its optimizer where ``optimizers`` are given.
        data: training and held-out samples.
        model: not wrapped yet.
        loss: sums and counts.
        world_size: number of ranks.
        device: of this rank.
        optimizers: over the model's parameters; by default the configuration's.
        callbacks: called before those of the configuration.
        metrics: further results of an evaluation, by name.
        record: the configuration to keep in checkpoints; by default ``config``.
        planned: True where the processes are not launched yet.

    Raises:
        ConfigError: as :func:`components_from_config`.
    """
    batch = config.batch
    plan = make_plan(
        data,
        global_batch_size=batch.global_size,
        tokens=batch.tokens,
        micro_batch_size=batch.micro_size,
        world_size=world_size,
        seed=config.seed,
        names=CONFIG_KEYS,
    )
    check_workers(data, plan, config.trainer.num_workers)
    if data.eval_dataset is not None and not len(data.eval_dataset):
        raise ConfigError("data", data.description, "holds out an empty set", "Hold out more, or nothing")
    if metrics and data.eval_dataset is not None and len(data.eval_dataset) < world_size:
        problem = f"holds out {len(data.eval_dataset)} samples for {world_size} ranks: a metric needs one on every rank"
        raise ConfigError("data", data.description, problem, "Hold out more samples, or leave metrics out")
    if batch.group_by_length and data.lengths is None:
        remedy = "Give lengths to its DataSpec: the tokens of each training sample"
        raise ConfigError("batch.group_by_length", True, "the data does not say how long its samples are", remedy)
    if not isinstance(model, nn.Module):
        raise ConfigError("model", type(model).__name__, "not a torch.nn.Module", "Name one as model._target_")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError("model", type(model).__name__, "has no parameter to train", "Unfreeze some of it")
    engine = prepare(
        model,
        engine=config.engine,
        precision=config.precision,
        clip_norm=config.optim.clip_norm,
        clip_value=config.optim.clip_value,
        global_batch_size=batch.global_size,
        micro_batch_size=batch.micro_size,
        world_size=world_size,
        device=device,
        seed=config.seed,
        planned=planned,
    )
    if config.checkpoint.every:
        weights.check_storable(model)
    if config.init_from is not None:
        weights.check(model, Path(config.init_from))
    total_steps = _total_steps(config, plan)
    return TrainingComponents(
        config=config,
        record=asdict(config) if record is None else record,
        data=data,
        plan=plan,
        model=model,
        parameters=sum(p.numel() for p in model.parameters()),
        loss=loss,
        optimizers=optimizers or [build_optimizer(config.optim, model, device)],
        schedule=build("schedule", config.schedule, total_steps=total_steps),
        callbacks=[*callbacks, *(build(f"callbacks.{name}", node) for name, node in config.callbacks.items())],
        metrics=metrics or {},
        engine=engine,
        device=device,
        total_steps=total_steps,
    )


def build_loggers(
    components: TrainingComponents, run_dir: RunDir, console: Console, *, wandb_id: str, about: Mapping[str, Any]
) -> list[Logger]:
    """The loggers of rank 0, each imported only where it is on; ``about`` is shown with the W&B run."""
    metrics = components.config.metrics
    loggers: list[Logger] = [JsonlLogger(run_dir.metrics)]
    if metrics.console:
        from distaccum.train.metrics.console import ConsoleLogger  # noqa: PLC0415

        loggers.append(ConsoleLogger(components.total_steps, console))
    if metrics.wandb.mode != "disabled":
        from distaccum.train.metrics.wandb import WandbLogger  # noqa: PLC0415

        loggers.append(WandbLogger(run_dir.path, **asdict(metrics.wandb), run_id=wandb_id, config=about))
    return loggers


def build_data(node: Node) -> DataSpec:
    """Builds ``data``: whatever :func:`to_data_spec` takes."""
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
