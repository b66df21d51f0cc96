"""Refusals of held-out sets that cannot be evaluated, and of names that no evaluation gives; before a process group."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate

from distaccum.config.schema import RunConfig
from distaccum.data.held_out import evaluation_workers
from distaccum.data.loading_processes import reading
from distaccum.data.spec import DataSpec, WorkerOptions, is_map_style
from distaccum.distributed.random import RNGState
from distaccum.errors import ConfigError, shorten
from distaccum.losses.base import AnyLoss, Scorer, score_names
from distaccum.losses.normalize import SINGLE
from distaccum.train.callbacks import Callback
from distaccum.train.submitit import check_of_records, names_of

_NAME = re.compile(r"\w[\w.-]*", re.ASCII)


def check_held_out(data: DataSpec, config: RunConfig, *, metrics: Mapping[str, Any], world_size: int) -> None:
    """Refuses what cannot be evaluated.

    Args:
        data: of the run.
        config: of the run.
        metrics: further results, by name.
        world_size: number of ranks.

    Raises:
        ConfigError: a set is empty, a stream or a ``DataLoader``, or has no name to show its results under; a metric
            has no sample on some rank; the run evaluates alone, and there is nothing to evaluate on.
    """
    if isinstance(data.eval_dataset, Mapping) and not data.eval_dataset:
        raise ConfigError("data", data.description or None, "holds out no set by name", "Hold out a set, or None")
    for name, held_out in data.held_out.items():
        _check_set(data, name, held_out)
        limit = config.trainer.eval_samples
        size = len(held_out) if limit is None else min(limit, len(held_out))
        if metrics and size < world_size:
            what = f"holds out {size} samples" + (f" as {name!r}" if name else "")
            problem = f"{what} for {world_size} ranks: a metric needs one on every rank"
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


def evaluates(data: DataSpec, config: RunConfig) -> bool:
    """Whether the run makes evaluations."""
    return bool(data.held_out) and config.trainer.eval_every > 0


def check_results(
    data: DataSpec, config: RunConfig, callbacks: Sequence[Callback], *, loss: AnyLoss, metrics: Mapping[str, Any]
) -> None:
    """Refuses results that no evaluation gives, as far as the names of held-out sets, scores and metrics tell.

    Args:
        data: of the run.
        config: of the run.
        callbacks: may look at results.
        loss: may score.
        metrics: further results, by name.

    Raises:
        ConfigError: ``checkpoint.best`` or an objective without evaluations; or these or a callback name no result of
            one set; or an objective is neither that nor a number of a record.
    """
    workers = evaluation_workers(data, config.trainer.num_workers, asdict(config.trainer.loader))
    best, names = config.checkpoint.best, cache(partial(_names, data, loss, metrics, workers))
    if best is not None and not evaluates(data, config):
        raise ConfigError("checkpoint.best", best, "the run has no evaluation", "Hold data out, and set eval_every")
    if best is not None:
        _check_result("checkpoint.best", best, best, data, names)
    for objective in names_of(config.objective):
        if not objective.startswith("eval_"):
            check_of_records(objective)
            continue
        if not evaluates(data, config):
            remedy = "Hold data out and set eval_every, or use a number of the records, as objective=loss"
            raise ConfigError("objective", objective, "the run has no evaluation", remedy)
        _check_result("objective", objective, objective, data, names)
    for callback in callbacks:
        if callback.watched_result is not None:
            shown = f"{type(callback).__name__}(metric={callback.watched_result!r})"
            _check_result("callbacks", shown, callback.watched_result, data, names)


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


def _names(data: DataSpec, loss: AnyLoss, metrics: Mapping[str, Any], workers: WorkerOptions) -> list[str] | None:
    """What the results of a held-out set are called, or patterns of it; None where nobody knows before they are there.

    A metric may give numbers by name.
    """
    if (scored := _scored(data, loss, workers)) is None:
        return None
    of_data = () if data.bytes_per_token is None else ("bits_per_byte",)
    of_metrics = [name for metric in metrics for name in (metric, f"{metric}_*")]
    return list(dict.fromkeys((SINGLE, *scored, *of_data, *of_metrics)))


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
