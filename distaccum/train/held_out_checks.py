"""Refusals of held-out sets that cannot be evaluated, and of names that no evaluation gives; before a process group."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.data import DataLoader

from distaccum.config.schema import RunConfig
from distaccum.data.spec import DataSpec, is_map_style
from distaccum.errors import ConfigError, shorten
from distaccum.train.callbacks import Callback

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


def check_results(data: DataSpec, config: RunConfig, callbacks: Sequence[Callback]) -> None:
    """Refuses results that no evaluation gives, as far as the names of the held-out sets tell.

    Raises:
        ConfigError: ``checkpoint.best`` without evaluations; or that or a callback names no result of one set.
    """
    best = config.checkpoint.best
    if best is not None and not evaluates(data, config):
        raise ConfigError("checkpoint.best", best, "the run has no evaluation", "Hold data out, and set eval_every")
    if best is not None:
        _check_result("checkpoint.best", best, best, data)
    for callback in callbacks:
        if callback.watched_result is not None:
            shown = f"{type(callback).__name__}(metric={callback.watched_result!r})"
            _check_result("callbacks", shown, callback.watched_result, data)


def _check_result(key: str, value: str, name: str, data: DataSpec) -> None:
    sets = list(data.held_out)
    if sets == [""]:
        if not name.startswith("eval_"):
            remedy = "Use eval_loss, or another result of the evaluation"
            raise ConfigError(key, value, "the names of an evaluation's results begin with eval_", remedy)
    elif sets and not any(name.startswith(f"eval_{one}_") for one in sets):
        problem = f"is no result of one of the held-out sets {shorten(sets)}"
        remedy = f"Use one of {', '.join(f'eval_{one}_loss' for one in sets)}, or another result of one of them"
        raise ConfigError(key, value, problem, remedy)
