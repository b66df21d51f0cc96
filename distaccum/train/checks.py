"""The checks of a run, in their order: what cannot work is refused before there is a process group."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, default_collate

from distaccum.checkpoint import weights
from distaccum.config.checks import EPOCH, GLOO
from distaccum.config.schema import RunConfig, names_of
from distaccum.data.factory import check_workers, loading_options
from distaccum.data.held_out import evaluation_workers
from distaccum.data.loading_processes import reading
from distaccum.data.plan.batch import Plan
from distaccum.data.plan.stream import StreamPlan
from distaccum.data.spec import DataSpec, WorkerOptions, is_map_style
from distaccum.distributed.random import RNGState
from distaccum.engines import compiled
from distaccum.engines.base import Engine
from distaccum.engines.factory import refuse_gloo
from distaccum.errors import ConfigError, shorten
from distaccum.losses.base import AnyLoss, Predictor, Scorer, is_window_loss, score_names
from distaccum.losses.normalize import SINGLE
from distaccum.program import CLASSES, HOST_MEMORY, METRICS, NOISE, OBJECTIVE, PROFILER, TEXTS, load
from distaccum.train import adapters, determinism, ema, packing
from distaccum.train.callbacks import Callback, Judging
from distaccum.train.callbacks import check as check_callbacks
from distaccum.train.evaluate import EvaluationMetric, evaluates
from distaccum.train.packing import check_padding

Texts: TypeAlias = Callable[[Engine], list[dict[str, str]]]


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

    @cached_property
    def texts(self) -> Texts | None:
        """What writes texts at an evaluation; None where none are asked for."""
        texts: Texts | None = load(TEXTS)(self.data, self.model, self.config) if self.config.eval.samples else None
        return texts

    @cached_property
    def metric_names(self) -> list[str]:
        """What results of the metrics are called, or patterns of it; ConfigError where one computes no result."""
        names: Any = load(METRICS)(self.data, self.model).names if self.metrics else None
        return [one for name, metric in self.metrics.items() for one in names(name, metric)]

    @cached_property
    def most_ahead(self) -> int | None:
        """How many micro-batches of a rank may be loaded ahead; None: any number."""
        return most_ahead(self.data, self.plan, self.config)


def most_ahead(data: DataSpec, plan: Plan | StreamPlan, config: RunConfig) -> int | None:
    """How many micro-batches of a rank may be loaded ahead within ``trainer.host_memory``; None: any number."""
    stated = config.trainer.host_memory
    if stated is None:
        return None
    found: int = load(HOST_MEMORY)(data, plan, loading_of(data, config), stated)
    return found


def loading_of(data: DataSpec, config: RunConfig, most_ahead: int | None = None) -> WorkerOptions:
    """How samples to train on are loaded, with at most so many micro-batches ahead."""
    return loading_options(
        data,
        num_workers=config.trainer.num_workers,
        prefetch_windows=config.trainer.prefetch_windows,
        options=asdict(config.trainer.loader),
        most_ahead=most_ahead,
    )


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
    if determinism.is_wanted(config):
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
            remedy = "Give an optimizer over model.parameters(), or leave it to config; a scheduler is schedule="
            raise ConfigError("optimizer", shown, problem, remedy)


def check_weights(config: RunConfig, model: nn.Module) -> None:
    """Refuses weights that cannot be saved, or a file to start from that is another model's.

    From here on checkpoints hold of a model with adapters these alone.

    Raises:
        ConfigError: either.
    """
    adapters.set_base_aside(model)
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


_NAME = re.compile(r"\w[\w.-]*", re.ASCII)


def check_held_out(run: Stated) -> None:
    """Refuses what cannot be evaluated.

    Raises:
        ConfigError: a set is empty, a stream or a ``DataLoader``, or has no name to show its results under; a metric
            has no sample on some rank; the run evaluates alone, and there is nothing to evaluate on.
    """
    data, config = run.data, run.config
    if isinstance(data.eval_dataset, Mapping) and not data.eval_dataset:
        raise ConfigError("data", data.description or None, "holds out no set by name", "Hold out a set, or None")
    for name, held_out in data.held_out.items():
        _check_set(data, name, held_out)
        limit = config.trainer.eval_samples
        size = len(held_out) if limit is None else min(limit, len(held_out))
        if run.metrics and size < run.world_size:
            what = f"holds out {size} samples" + (f" as {name!r}" if name else "")
            problem = f"{what} for {run.world_size} ranks: a metric needs one on every rank"
            raise ConfigError("data", data.description, problem, "Hold out more samples, or leave metrics out")
    if config.trainer.max_steps == 0 and not evaluates(data, config):
        why = "the data holds nothing out" if not data.held_out else "trainer.eval_every=0 switches evaluation off"
        problem = f"makes no update and evaluates once, and {why}"
        raise ConfigError("trainer.max_steps", 0, problem, "Hold data out and set eval_every, or make updates")


def _check_set(data: DataSpec, name: Any, held_out: Any) -> None:
    if isinstance(data.eval_dataset, Mapping) and not (isinstance(name, str) and _NAME.fullmatch(name)):
        problem = f"names a held-out set {name!r}, and its results are eval_NAME_loss"
        raise ConfigError("data", data.description or None, problem, "Use letters, digits, _, - and .")
    called = f" as {name!r}" if name else ""
    kind = type(held_out).__name__
    if not hasattr(held_out, "__len__"):
        problem = f"holds out a {kind} without a length{called}"
        raise ConfigError(
            "data", data.description or None, problem, "Hold out a map-style dataset: list(...) makes one"
        )
    if isinstance(held_out, DataLoader) or not is_map_style(held_out):
        problem = f"holds out a {kind} without samples by index{called}"
        remedy = "Hold out a map-style dataset, such as the DataLoader's own"
        raise ConfigError("data", data.description or None, problem, remedy)
    if not len(held_out):
        raise ConfigError("data", data.description, f"holds out an empty set{called}", "Hold out more, or nothing")


def check_intervals(run: Stated) -> None:
    """Refuses what is due at the end of each epoch of data whose epochs have no known end.

    Raises:
        ConfigError: the data is a stream.
    """
    stated = {"trainer.eval_every": run.config.trainer.eval_every, "checkpoint.every": run.config.checkpoint.every}
    for key, every in stated.items() if run.plan.is_stream else ():
        if every == EPOCH:
            problem = "the data is a stream, and nobody knows how long its epoch is"
            raise ConfigError(key, every, problem, "Give a number of updates")


def check_results(run: Stated) -> None:
    """Refuses results that no evaluation gives, as far as the names of held-out sets, scores and metrics tell.

    Raises:
        ConfigError: ``checkpoint.best`` or an objective without evaluations; or these or a callback name no result of
            one set; or an objective is neither that nor a number of a record.
    """
    data, config = run.data, run.config
    workers = evaluation_workers(data, config.trainer.num_workers, asdict(config.trainer.loader))
    best, names = config.checkpoint.best, cache(partial(_names, run, workers))
    if best is not None and not evaluates(data, config):
        raise ConfigError("checkpoint.best", best, "the run has no evaluation", "Hold data out, and set eval_every")
    if best is not None:
        _check_result("checkpoint.best", best, best, data, names)
        config.checkpoint.mode_of_best()
    for objective in names_of(config.objective):
        if not objective.startswith("eval_"):
            load(OBJECTIVE)(objective)
            continue
        if not evaluates(data, config):
            remedy = "Hold data out and set eval_every, or use a number of the records, as objective=loss"
            raise ConfigError("objective", objective, "the run has no evaluation", remedy)
        _check_result("objective", objective, objective, data, names)
    for callback in run.callbacks:
        if callback.watched_result is not None:
            shown = f"{type(callback).__name__}(metric={callback.watched_result!r})"
            _check_result("callbacks", shown, callback.watched_result, data, names)
        if isinstance(callback, Judging):
            callback.require_mode()


def _check_result(key: str, value: str, name: str, data: DataSpec, names: Callable[[], list[str] | None]) -> None:
    sets = list(data.held_out)
    if sets == [""]:
        if not name.startswith("eval_"):
            remedy = "Use eval_loss, or another result of the evaluation"
            raise ConfigError(key, value, "the names of an evaluation's results begin with eval_", remedy)
    elif sets and not any(name.startswith(f"eval_{one}_") for one in sets):
        problem = f"is no result of one of the held-out sets {shorten(sets)}"
        remedy = f"Use one of {', '.join(f'eval_{one}_loss' for one in sets)}, or another result of one of them"
        raise ConfigError(key, value, problem, remedy)
    prefixes = [f"eval_{one}_" if one else "eval_" for one in sets]
    if not sets or any(name == f"{prefix}{SINGLE}" for prefix in prefixes) or (known := names()) is None:
        return
    results = [f"{prefix}{one}" for prefix in prefixes for one in known]
    if not any(fnmatchcase(name, result) for result in results):
        remedy = f"Use one of {', '.join(result for result in results if not result.endswith('*'))}"
        raise ConfigError(key, value, "is no result of the evaluation", remedy)


def _names(run: Stated, workers: WorkerOptions) -> list[str] | None:
    """What the results of a held-out set are called, or patterns of it; None where nobody knows beforehand."""
    if (scored := _scored(run.data, run.loss, workers)) is None:
        return None
    of_data = () if run.data.bytes_per_token is None else ("bits_per_byte",)
    return list(dict.fromkeys((SINGLE, *scored, *of_data, *run.metric_names)))


def _scored(data: DataSpec, loss: AnyLoss, workers: WorkerOptions) -> Sequence[str] | None:
    """The names that the loss scores by; None where nobody knows before an evaluation.

    One without ``scores`` is asked for the count of a sample: several losses may differ from batch to batch.
    """
    if (names := score_names(loss)) is not None or isinstance(loss, Scorer):
        return names
    before = RNGState.capture(torch.device("cpu"))
    try:
        held_out, collate = next(iter(data.held_out.values())), data.collate or default_collate
        single: bool = next(reading(held_out, [[0]], _CountsOne(loss, collate), workers))
    except Exception:  # the evaluation itself says so, where it reads the sample
        return None
    finally:
        before.restore()
    return [SINGLE] if single else None


class _CountsOne:
    """Whether the batch of some samples counts for a single loss."""

    def __init__(self, loss: AnyLoss, collate: Callable[[list[Any]], Any]) -> None:
        self._loss, self._collate = loss, collate

    def __call__(self, samples: list[Any]) -> bool:
        """Of these samples."""
        return not isinstance(self._loss.count(self._collate(samples)), Mapping)


def _check_profile(run: Stated) -> None:
    """The profiler says itself what it cannot give."""
    if run.config.profile.steps is not None:
        load(PROFILER).check(run.config.profile, run.device, run.total_steps)


def _check_noise(run: Stated) -> None:
    """Of a run that is to measure it."""
    if run.config.batch.noise:
        load(NOISE)(run)


def _check_classes(run: Stated) -> None:
    """Of a model with classes as transformers names them."""
    if hasattr(getattr(run.model, "config", None), "id2label"):
        load(CLASSES)(run.data, run.model, run.loss)


CHECKS: Sequence[Callable[[Stated], object]] = (
    lambda run: check_workers(run.data, run.plan, run.config.trainer.num_workers, asdict(run.config.trainer.loader)),
    check_intervals,
    check_held_out,
    lambda run: check_model(run.model),
    lambda run: check_hardware(run.config, run.device),
    lambda run: check_padding(run.data, run.model),
    lambda run: packing.check_model(run.model, run.data),
    lambda run: check_loss(run.loss),
    lambda run: compiled.check_loss(run.loss, run.config.compile),
    lambda run: _check_with_model(run.loss, run.model),
    _check_classes,
    lambda run: _check_loss_parameters(run.loss, run.model),
    lambda run: check_metrics(run.metrics, run.loss, evaluated=bool(run.data.held_out)),
    lambda run: run.metric_names,
    _check_profile,
    _check_noise,
    lambda run: check_callbacks(run.callbacks, evaluates=evaluates(run.data, run.config)),
    lambda run: ema.check(run.callbacks, run.config),
    check_results,
    lambda run: check_groups(run.config, run.optimizers),
    lambda run: check_optimizers(run.optimizers),
    lambda run: check_weights(run.config, run.model),
    lambda run: run.texts,
    lambda run: run.most_ahead,
)
"""Every check of a run, in order: each may rely on those before it."""
