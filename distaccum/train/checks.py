"""The checks of a run, in their order: what cannot work is refused before there is a process group.

A check takes plain values and raises :class:`ConfigError`; it stands beside what it checks. :data:`CHECKS` says which
values of a run each of them gets.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from distaccum.checkpoint import weights
from distaccum.config.checks import GLOO
from distaccum.config.schema import RunConfig
from distaccum.data.factory import check_workers
from distaccum.data.plan.batch import Plan
from distaccum.data.plan.stream import StreamPlan
from distaccum.data.spec import DataSpec
from distaccum.engines import compiled
from distaccum.engines.factory import refuse_gloo
from distaccum.errors import ConfigError, shorten
from distaccum.losses.base import AnyLoss, Predictor, is_window_loss
from distaccum.train import determinism, ema, packing
from distaccum.train.callbacks import Callback
from distaccum.train.callbacks import check as check_callbacks
from distaccum.train.evaluate import EvaluationMetric
from distaccum.train.held_out_checks import check_held_out, check_results, evaluates
from distaccum.train.packing import check_padding
from distaccum.train.profiling import check_profile


@dataclass(frozen=True, kw_only=True)
class Stated:
    """What a run is given, and what follows from that by arithmetic.

    Args:
        config: of the run.
        data: packed already.
        plan: of the training data.
        model: not wrapped yet.
        loss: sums and counts.
        optimizers: those that are given; empty where the configuration's are built.
        callbacks: those that are given, and the configuration's.
        metrics: further results of an evaluation, by name.
        total_steps: updates of the run.
        world_size: number of ranks.
        device: of this rank.
    """

    config: RunConfig
    data: DataSpec
    plan: Plan | StreamPlan
    model: nn.Module
    loss: AnyLoss
    optimizers: Sequence[Optimizer]
    callbacks: Sequence[Callback]
    metrics: Mapping[str, EvaluationMetric]
    total_steps: int
    world_size: int
    device: torch.device


def check_lengths(data: DataSpec, *, grouped: bool) -> None:
    """Samples can only be grouped by a length that is known.

    Raises:
        ConfigError: they are to be, and the data does not say.
    """
    if grouped and data.lengths is None:
        remedy = "Give lengths to its DataSpec: the tokens of each training sample"
        raise ConfigError("batch.group_by_length", True, "the data does not say how long its samples are", remedy)


def check_model(model: Any) -> None:
    """Refuses what cannot be trained.

    Raises:
        ConfigError: it is no module, has parameters without shapes, or none to train.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError("model", type(model).__name__, "not a torch.nn.Module", "Name one as model._target_")
    lazy = [name for name, parameter in model.named_parameters() if is_lazy(parameter)]
    if lazy:
        problem = f"{shorten(lazy)} get their shapes in the first forward"
        raise ConfigError("model", type(model).__name__, problem, "Run one batch through it before it is trained")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError("model", type(model).__name__, "has no parameter to train", "Unfreeze some of it")


def check_hardware(config: RunConfig, device: torch.device) -> None:
    """Refuses numerics, or a backend, that this device has not.

    Raises:
        ConfigError: either.
    """
    if config.deterministic or config.reproducible:
        determinism.check(device)
    if config.trainer.backend == GLOO:
        refuse_gloo(config.engine, device, key="trainer.backend")


def check_loss(loss: Any) -> None:
    """Refuses what is no loss by its interface; what it returns is looked at in the first micro-batch.

    Raises:
        ConfigError: it is a class, or lacks ``count(batch)`` or ``__call__(model, batch)``; or, where it has
            ``represent(model, batch)``, ``__call__(representations)``.
    """
    shown = getattr(loss, "__name__", type(loss).__name__)
    if inspect.isclass(loss):
        raise ConfigError("loss", shown, "is a class", f"Make an object of it, as in {shown}()")
    if not callable(getattr(loss, "count", None)):
        problem = "has no count(batch), the number of labels or samples that the loss of a batch sums over"
        remedy = "Use distaccum.CrossEntropy, or write a class with count(self, batch) and __call__(self, model, batch)"
        raise ConfigError("loss", shown, problem, remedy)
    called, methods = "model, batch", [("count", loss.count, "batch")]
    if is_window_loss(loss):
        called = "representations"
        methods.append(("represent", loss.represent, "model, batch"))
        if callable(own := getattr(loss, "scores", None)):
            methods.append(("scores", own, "representations"))
    for name, function, arguments in (*methods, ("__call__", loss, called)):
        if not callable(function):
            what = "cannot be called" if name == "__call__" else f"has a {name} that cannot be called"
            raise ConfigError("loss", shown, what, f"Write {name}(self, {arguments}) -> its sum")
        try:
            inspect.signature(function).bind(*arguments.split(", "))
        except ValueError:  # a function without a signature
            continue
        except TypeError as error:
            problem, remedy = f"{name} takes other arguments ({error})", f"Write {name}(self, {arguments})"
            raise ConfigError("loss", shown, problem, remedy) from error


def _check_loss_parameters(loss: Any, model: nn.Module) -> None:
    if not isinstance(loss, nn.Module):
        return
    own = set(map(id, model.parameters()))
    names = [name for name, p in loss.named_parameters() if p.requires_grad and id(p) not in own]
    if names:
        problem = (
            f"trains {shorten(names)}, which are not the model's: no engine would reduce and no optimizer step them"
        )
        remedy = "Make them a part of the model, as in nn.ModuleDict, or freeze them"
        raise ConfigError("loss", type(loss).__name__, problem, remedy)


def check_metrics(metrics: Mapping[str, Any], loss: AnyLoss, *, evaluated: bool) -> None:
    """Refuses further results that cannot be computed, or never would be.

    Raises:
        ConfigError: one is no metric, the loss has no predictions, or nothing is held out.
    """
    for name, metric in metrics.items():
        missing = [method for method in ("update", "compute", "reset") if not callable(getattr(metric, method, None))]
        if missing or inspect.isclass(metric):
            problem = f"has no {', '.join(missing)}" if missing else "is a class"
            remedy = "Give objects of torchmetrics: a plain function's means of batches are no mean of all samples"
            raise ConfigError(f"metrics.{name}", type(metric).__name__, problem, remedy)
    if metrics and not isinstance(loss, Predictor):
        problem = "has no predictions(model, batch), which metrics are computed from"
        raise ConfigError("loss", type(loss).__name__, problem, "Write it: it returns (predictions, targets)")
    if metrics and not evaluated:
        problem = f"{shorten(metrics)} would never be computed: the data holds nothing out"
        raise ConfigError("metrics", None, problem, "Give the data an eval_dataset, or leave metrics out")


def check_optimizers(optimizers: Sequence[Any]) -> None:
    """Refuses what is no optimizer.

    Raises:
        ConfigError: one is a class, a scheduler, or something else.
    """
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            shown = f"the class {optimizer.__name__}" if inspect.isclass(optimizer) else type(optimizer).__name__
            problem = "is a scheduler" if isinstance(optimizer, LRScheduler) else "is no torch.optim.Optimizer"
            remedy = "Give an optimizer over model.parameters(), or leave it to config; a schedule is config's"
            raise ConfigError("optimizer", shown, problem, remedy)


def check_weights(config: RunConfig, model: nn.Module) -> None:
    """Refuses weights that cannot be saved, or a file to start from that is another model's.

    Raises:
        ConfigError: either.
    """
    if config.checkpoint.saves:
        weights.check_storable(model)
    if config.init_from is not None:
        weights.check(model, Path(config.init_from), missing=config.init.missing, unexpected=config.init.unexpected)


def check_groups(config: RunConfig, optimizers: Sequence[Any]) -> None:
    """Optimizers that are given have groups of their own.

    Raises:
        ConfigError: the configuration states groups too.
    """
    if optimizers and config.optim.groups:
        problem = "and optimizers are given, which have groups of their own"
        raise ConfigError("optim.groups", config.optim.groups, problem, "Give one of the two")


def _check_with_model(loss: Any, model: nn.Module) -> None:
    """A loss that only some models can have says so itself."""
    if (check := getattr(loss, "check_model", None)) is not None:
        check(model)


CHECKS: Sequence[Callable[[Stated], None]] = (
    lambda run: check_workers(run.data, run.plan, run.config.trainer.num_workers, asdict(run.config.trainer.loader)),
    lambda run: check_held_out(run.data, run.config, metrics=run.metrics, world_size=run.world_size),
    lambda run: check_lengths(run.data, grouped=run.config.batch.group_by_length),
    lambda run: check_model(run.model),
    lambda run: check_hardware(run.config, run.device),
    lambda run: check_padding(run.data, run.model),
    lambda run: packing.check_model(run.model, run.data),
    lambda run: check_loss(run.loss),
    lambda run: compiled.check_loss(run.loss, run.config.compile),
    lambda run: _check_with_model(run.loss, run.model),
    lambda run: _check_loss_parameters(run.loss, run.model),
    lambda run: check_metrics(run.metrics, run.loss, evaluated=bool(run.data.held_out)),
    lambda run: check_profile(run.config.profile, run.device, run.total_steps),
    lambda run: check_callbacks(run.callbacks, evaluates=evaluates(run.data, run.config)),
    lambda run: ema.check(run.callbacks, run.config),
    lambda run: check_results(run.data, run.config, run.callbacks, loss=run.loss, metrics=run.metrics),
    lambda run: check_groups(run.config, run.optimizers),
    lambda run: check_optimizers(run.optimizers),
)
"""Every check of a run, in order: each may rely on those before it."""
