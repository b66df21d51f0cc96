"""The loggers of a run, from their settings; each is imported only where it is on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

from distaccum.accumulation.progress import Progress
from distaccum.config.extras import install_command
from distaccum.config.instantiate import build, check
from distaccum.config.metrics import MetricsConfig
from distaccum.config.trainer import CheckpointConfig
from distaccum.errors import ConfigError
from distaccum.program import MLFLOW, TENSORBOARD, WANDB, WANDB_KEY, load
from distaccum.train.metrics.background import Tolerant
from distaccum.train.metrics.loggers import JsonlLogger, Logger, RunInfo

if TYPE_CHECKING:
    import torch


def check_loggers(metrics: MetricsConfig) -> None:
    """Refuses what cannot be built, before there is a process group.

    Raises:
        ConfigError: a package is missing, a key of W&B, or a ``_target_``.
    """
    load(WANDB_KEY)(metrics.wandb)
    for name, wanted in (("tensorboard", metrics.tensorboard.enabled), ("mlflow", metrics.mlflow.enabled)):
        if wanted and find_spec(name) is None:
            key = f"metrics.{name}.enabled"
            raise ConfigError(key, True, f"{name} is not installed", f"Run {install_command(name)}")
    for name, node in metrics.loggers.items():
        key = f"metrics.loggers.{name}"
        check(key, node, takes=Logger)


def build_loggers(
    metrics: MetricsConfig,
    checkpoint: CheckpointConfig,
    run: RunInfo,
    console: Logger | None,
    *,
    device: torch.device,
    given: Sequence[Logger] = (),
    progress: Callable[[], Progress] = Progress,
    users: Sequence[object] = (),
) -> list[Logger]:
    """The loggers of rank 0, begun: ``metrics.jsonl`` first, then what the settings turn on, then those ``given``.

    ``console`` is the console's, which stands already; None without one. ``device`` is the training's, ``progress`` the
    run's. Where one of ``users``, callbacks and the loss, names W&B itself, this waits for W&B's run. All but the first
    two loggers raise nothing.
    """
    loggers: list[Logger] = [JsonlLogger(run.folder / "metrics.jsonl")]
    others: list[Logger] = []
    if console is not None:
        others.append(console)
    best = checkpoint.best, checkpoint.mode_of_best() if checkpoint.best else "min"
    others += load(WANDB)(metrics.wandb, run, best, progress, users)
    if metrics.tensorboard.enabled:
        others.append(Tolerant("tensorboard", load(TENSORBOARD)))
    if metrics.mlflow.enabled:
        others.append(load(MLFLOW)(metrics.mlflow, run.folder))
    for name, node in metrics.loggers.items():
        others.append(Tolerant(name, partial(build, f"metrics.loggers.{name}", node, takes=Logger), draws_on=device))
    others += [Tolerant(type(logger).__name__, partial(_itself, logger), draws_on=device) for logger in given]
    for logger in others:
        logger.begin(run)
    return [*loggers, *others]


def _itself(logger: Logger) -> Logger:
    return logger
