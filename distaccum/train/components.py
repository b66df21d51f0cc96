"""Composition root: turns the names in the configuration into model, data, loss, optimizer, schedule and loggers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from distaccum.accumulation.schedulers import has_two_weights
from distaccum.accumulation.tracker import Schedule
from distaccum.config.batch import SAMPLES
from distaccum.config.checks import LASTS, Node
from distaccum.config.compile import CompileConfig
from distaccum.config.engine import FSDP2Config, engine_config
from distaccum.config.instantiate import build, signature_of, target_of
from distaccum.config.precision import PrecisionConfig
from distaccum.config.schema import RunConfig
from distaccum.config.secrets import redact
from distaccum.data.adapters import to_data_spec
from distaccum.data.agreement import fingerprint
from distaccum.data.factory import make_plan
from distaccum.data.plan.batch import CONFIG_KEYS, Plan
from distaccum.data.plan.scheduled import Stage
from distaccum.data.plan.stream import StreamPlan
from distaccum.data.spec import DataSpec
from distaccum.engines.context import EngineBuilder, EngineContext
from distaccum.engines.factory import prepare
from distaccum.engines.numerics import Numerics
from distaccum.errors import ON_ALL_RANKS, ConfigError
from distaccum.losses.base import AnyLoss
from distaccum.precision.policy import PrecisionPolicy
from distaccum.program import BALANCED, FROM_DATA, load
from distaccum.train import adapters, determinism, packing
from distaccum.train.callbacks import Callback
from distaccum.train.checks import CHECKS, Stated, Texts, check_optimizers, loading_of
from distaccum.train.config_diff import structure
from distaccum.train.evaluate import EvaluationMetric
from distaccum.train.metrics.loggers import Logger
from distaccum.train.optimizer import GroupSize, build_optimizers, group_sizes
from distaccum.train.rates import built_with, make_schedule
from distaccum.train.schedules import Constant

_log = logging.getLogger(__name__)
First = Callable[[], AbstractContextManager[None]]
_FINE_TUNING = 3e-4  # Adam's highest usual rate where weights are pretrained


@dataclass(frozen=True, kw_only=True)
class TrainingComponents:
    """All that can be built, and can fail for the user's reasons, before there is a process group.

    ``record`` is the configuration as checkpoints and W&B keep it: that of the objects which train, without secrets.
    ``parameters`` is the number of elements, counted before an engine shards them, and ``groups`` those of each
    parameter group that the configuration states. ``most_ahead``: micro-batches of a rank that may be loaded ahead;
    None: any number. ``memory`` says how the micro-batch was found; see ``train/micro_batch.py``.
    """

    config: RunConfig
    record: Mapping[str, Any]
    data: DataSpec
    plan: Plan | StreamPlan
    model: nn.Module
    parameters: int
    loss: AnyLoss
    optimizers: Sequence[Optimizer]
    groups: Sequence[GroupSize]
    schedule: Schedule
    callbacks: Sequence[Callback]
    metrics: Mapping[str, EvaluationMetric]
    loggers: Sequence[Logger] = ()
    texts: Texts | None = None
    engine: EngineContext
    device: torch.device
    total_steps: int
    most_ahead: int | None = None
    memory: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def facts(self) -> Mapping[str, Any]:
        """What tells this model, loss and data from others: for a checkpoint; before an engine wraps the model."""
        data = fingerprint(self.data, loading_of(self.data, self.config))
        found = {"model": structure(self.model), "loss": structure(self.loss), "data": data}
        if self.engine.numerics.fixed_order:
            found["kernels"] = determinism.kernels(self.config, self.device)
        return found | {"adapters": adapters.facts(self.model)}

    def found(self, **changes: Any) -> TrainingComponents:
        """The same with what was found out since, as another plan, after an engine has wrapped the model."""
        other = replace(self, **changes)
        if "facts" in vars(self):  # of the model that was not wrapped yet
            vars(other)["facts"] = self.facts
        return other

    @property
    def evaluates_alone(self) -> bool:
        """Whether the run makes no update: it evaluates the weights that it starts from, once."""
        return self.config.trainer.limits[0] == 0

    @property
    def policy(self) -> PrecisionPolicy:
        """What the model computes in."""
        return self.engine.policy

    def lr_factor(self, step: int) -> float:
        """The factor of every learning rate for the update after ``step`` applied ones."""
        factor = self.schedule(step)
        for callback in self.callbacks:
            factor *= callback.lr_factor
        return factor


def components_from_config(
    config: RunConfig,
    *,
    world_size: int,
    device: torch.device,
    planned: bool = False,
    builder: EngineBuilder | None = None,
    first: First = nullcontext,
) -> TrainingComponents:
    """Builds every component that the configuration names.

    Args:
        config: names model, data and loss too.
        world_size: number of ranks.
        device: of this rank.
        planned: True where the processes are not launched yet.
        builder: makes the engine in the factory's place.
        first: a context in which one rank of a machine runs before its others: what it caches, they find.

    Raises:
        ConfigError: something cannot be built on this machine.
    """
    with first() if _fills_caches(config.data) else nullcontext():
        data = build_data(config.data)
    on_meta = torch.device("meta") if getattr(config.engine, "meta_init", False) else nullcontext()
    with on_meta, first() if _fills_caches(config.model) else nullcontext():
        model = build_model(config, data)
    loss = build("loss", config.loss)
    return build_components(
        config, data, model, loss, world_size=world_size, device=device, planned=planned, builder=builder
    )


def _fills_caches(node: Node) -> bool:
    """Whether what is built may download or prepare: a user's own may, and what names a model of the hub."""
    return not str(node.get("_target_")).startswith("distaccum.") or bool({"name", "tokenizer"} & node.keys())


def build_model(config: RunConfig, data: DataSpec) -> nn.Module:
    """Builds ``model`` with weights of the run's seed; one that takes ``from_data`` is told what follows from these.

    See :func:`distaccum.models.pretrained.pretrained`.
    """
    told = {}
    if "from_data" in signature_of(target_of("model", config.model)):
        told["from_data"] = load(FROM_DATA)(data, build("loss", config.loss))
    torch.manual_seed(config.seed)
    model: nn.Module = build("model", config.model, **told)
    return model


def build_components(
    config: RunConfig,
    data: DataSpec,
    model: nn.Module,
    loss: AnyLoss,
    *,
    world_size: int,
    device: torch.device,
    optimizers: Sequence[Optimizer] = (),
    schedule: Any = None,
    callbacks: Sequence[Callback] = (),
    metrics: Mapping[str, EvaluationMetric] | None = None,
    loggers: Sequence[Logger] = (),
    record: Mapping[str, Any] | None = None,
    planned: bool = False,
    builder: EngineBuilder | None = None,
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
        schedule: what ``make_schedule`` takes, which ``config.schedule`` describes; by default that is what is built.
        callbacks: called before those of the configuration.
        metrics: further results of an evaluation, by name.
        loggers: of the records, beside those of the configuration.
        record: the configuration to keep in checkpoints; by default ``config``.
        planned: True where the processes are not launched yet.
        builder: makes the engine in the factory's place.

    Raises:
        ConfigError: as :func:`components_from_config`.
    """
    config = config.with_schedule(own_optimizer=bool(optimizers))
    data = packing.pack(replace(data, pad_rows=data.pad_rows or config.batch.pad_rows), config.batch, loss)
    plan = plan_of(config, data, model, loss, world_size)
    everyone = [*callbacks, *_callbacks_of(config)]
    stated = Stated(
        config=config,
        data=data,
        plan=plan,
        model=model,
        loss=loss,
        optimizers=optimizers,
        callbacks=everyone,
        metrics=metrics or {},
        total_steps=_total_steps(config, plan),
        world_size=world_size,
        device=device,
    )
    for check in CHECKS:
        check(stated)
    engine = _prepare_engine(stated, planned=planned, builder=builder)
    config = replace(config, precision=engine.precision)  # which may be the model's own
    made = {"schedule": config.schedule, "precision": asdict(config.precision)}
    trained = optimizers or _build_optimizers(config, model, device)
    return TrainingComponents(
        config=config,
        record=redact({**(record or asdict(config)), **made}),
        data=data,
        plan=plan,
        model=model,
        parameters=sum(p.numel() for p in model.parameters()),
        loss=loss,
        optimizers=trained,
        groups=[] if optimizers else group_sizes(config.optim, model),
        schedule=_schedule_of(stated, schedule, trained),
        callbacks=everyone,
        metrics=stated.metrics,
        loggers=loggers,
        texts=stated.texts,
        engine=engine,
        device=device,
        total_steps=stated.total_steps,
        most_ahead=stated.most_ahead,
    )


def _callbacks_of(config: RunConfig) -> list[Callback]:
    return [build(f"callbacks.{name}", node, takes=Callback) for name, node in config.callbacks.items()]


def _prepare_engine(stated: Stated, *, planned: bool, builder: EngineBuilder | None) -> EngineContext:
    config = stated.config
    context = EngineContext(
        engine=engine_config(config.engine),
        precision=PrecisionConfig.of(config.precision),
        compile=CompileConfig.of(config.compile),
        clip_norm=config.optim.clip_norm,
        clip_value=config.optim.clip_value,
        global_batch_size=config.batch.global_size,
        micro_batch_size=config.batch.first_micro_size,
        world_size=stated.world_size,
        device=stated.device,
        seed=config.seed,
        planned=planned,
        numerics=_numerics(config),
        builder=builder,
    )
    return prepare(stated.model, context)


def plan_of(config: RunConfig, data: DataSpec, model: nn.Module, loss: AnyLoss, world_size: int) -> Plan | StreamPlan:
    """The plan of a run's windows over so many ranks."""
    batch = config.batch
    plan = make_plan(
        data,
        global_batch_size=batch.global_size,
        tokens=batch.tokens,
        micro_batch_size=batch.first_micro_size,
        world_size=world_size,
        seed=config.seed,
        stages=[_stage(stage) for stage in batch.schedule],
        micro_tokens=batch.micro_tokens,
        limits_samples=batch.limits_samples,
        group_by_length=batch.group_by_length,
        names=CONFIG_KEYS,
    )
    if batch.balance != SAMPLES:
        plan = load(BALANCED)(plan, data, model, loss, config)
    return _numerics(config).plan(plan, names=CONFIG_KEYS)


def _numerics(config: RunConfig) -> Numerics:
    return Numerics.of(config.numerics, config.batch.virtual_ranks)


def _build_optimizers(config: RunConfig, model: nn.Module, device: torch.device) -> Sequence[Optimizer]:
    """The configuration's optimizers; none has a kernel of one pass where it would step shards to other bits."""
    shards = _numerics(config).fixed_order and config.engine.name == FSDP2Config.name
    optim = replace(config.optim, fused=False) if shards and config.optim.fused == "auto" else config.optim
    optimizers = build_optimizers(optim, model, device)
    check_optimizers(optimizers)
    return optimizers


def _warn_of_rates(optimizers: Sequence[Optimizer], *, is_pretrained: bool) -> None:
    rates = [(built_with(group), type(one).__name__) for one in optimizers for group in one.param_groups]
    if not any(rate for rate, _ in rates):
        _log.warning("every learning rate of the optimizers is 0: nothing will be trained", extra=ON_ALL_RANKS)
    highest = max((rate for rate, name in rates if "adam" in name.lower()), default=0.0)
    if is_pretrained and highest > _FINE_TUNING:
        usual = "experiment=finetune-full has 2e-5, experiment=finetune-lora 2e-4"
        text = "a learning rate of %g is high for weights that are trained already: %s"
        _log.warning(text, highest, usual, extra=ON_ALL_RANKS)


def _is_pretrained(config: RunConfig, model: nn.Module) -> bool:
    """Whether the weights come from files: ``init_from``, or a model of transformers that has a name."""
    named = bool(getattr(model, "name_or_path", "")) and not config.model.get("from_config", False)
    return named or config.init_from is not None


def _stage(stated: Mapping[str, int]) -> Stage:
    (unit,) = (unit for unit in LASTS if unit in stated)
    return Stage(stated["global_size"], stated[unit], unit)


def build_data(node: Node) -> DataSpec:
    """Builds ``data``: whatever :func:`to_data_spec` takes."""
    data = build("data", node)
    try:
        return to_data_spec(data)
    except TypeError as error:
        raise ConfigError("data._target_", node["_target_"], str(error), "Return one of these from it") from error


def _schedule_of(stated: Stated, given: Any, optimizers: Sequence[Optimizer]) -> Schedule:
    """The schedule of a run, which steps these optimizers: the one that is ``given``, or the configuration's.

    Raises:
        ConfigError: it cannot be built; or it, or a callback, changes the rate of a schedule-free optimizer, whose
            averages stand for a schedule.
    """
    node, total_steps = stated.config.schedule, stated.total_steps
    if total_steps:
        _warn_of_rates(optimizers, is_pretrained=_is_pretrained(stated.config, stated.model))
    if not total_steps:
        return Constant(total_steps=0)
    peak = built_with(optimizers[0].param_groups[0]) if stated.optimizers else stated.config.optim.lr
    schedule = make_schedule(
        node if given is None else given, total_steps=total_steps, peak=peak, optimizers=stated.optimizers
    )
    if given is None and any(hasattr(one.step, "_wrapped_by_lr_sched") for one in stated.optimizers):  # torch's mark
        text = "a scheduler was made over the optimizer, and nothing steps it: give it as schedule="
        _log.warning(text, extra=ON_ALL_RANKS)
    free = [type(one).__name__ for one in optimizers if has_two_weights(one)]
    if not free:
        return schedule
    problem = f"changes the rate of {free[0]}, whose averages stand for a schedule"
    if len({schedule(step) for step in range(total_steps)}) > 1:
        raise ConfigError("schedule", node["_target_"], problem, "Use schedule=constant, and its own warm-up")
    changing = [type(one).__name__ for one in stated.callbacks if type(one).lr_factor is not Callback.lr_factor]
    if changing:
        raise ConfigError("callbacks", changing[0], problem, "Leave it out, or use another optimizer")
    return schedule


def _total_steps(config: RunConfig, plan: Plan | StreamPlan) -> int:
    steps, epochs = config.trainer.limits
    if plan.is_stream:
        if steps is None:
            remedy = "State it: the schedule needs the end, and nobody knows how long a stream is"
            raise ConfigError("trainer.max_steps", "null", "the data is a stream", remedy)
        return steps
    return min(limit for limit in (steps, None if epochs is None else plan.updates(epochs)) if limit is not None)
