"""The loggers of a run, from their settings; each is imported only where it is on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

from distaccum.accumulation.progress import Progress
from distaccum.config.extras import install_command
from distaccum.config.instantiate import build, check
from distaccum.config.metrics import MetricsConfig, WandbConfig
from distaccum.config.trainer import CheckpointConfig
from distaccum.errors import ConfigError
from distaccum.program import MLFLOW, TENSORBOARD, load
from distaccum.train.metrics.background import UPLOAD_TIMEOUT_S, InThread, KeptCheckpoints, Tolerant
from distaccum.train.metrics.loggers import JsonlLogger, Logger, RunInfo
from distaccum.train.metrics.wandb import WandbLogger, remedy_of, require_key, resolved

if TYPE_CHECKING:
    import torch

_WANDB_TIMEOUT_S = 8.0
_OFFLINE_TIMEOUT_S = 60.0  # no server is waited for, but a machine that is busy


def check_loggers(metrics: MetricsConfig) -> None:
    """Refuses what cannot be built, before there is a process group.

    Raises:
        ConfigError: a package is missing, a key of W&B, or a ``_target_``.
    """
    if (mode := resolved(metrics.wandb).mode) == "online":
        require_key(mode)
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
    wandb = resolved(metrics.wandb)
    if wandb.mode != "disabled":
        best = checkpoint.best, checkpoint.mode_of_best() if checkpoint.best else "min"
        others.append(_wandb(wandb, run, best, progress, awaited=any(map(_names_wandb, users))))
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


def _wandb(
    settings: WandbConfig,
    run: RunInfo,
    best: tuple[str | None, str],
    progress: Callable[[], Progress],
    *,
    awaited: bool,
) -> Logger:
    timeout = _OFFLINE_TIMEOUT_S if settings.mode == "offline" else _WANDB_TIMEOUT_S
    awaited_s = timeout if awaited else 0.0
    timeout = timeout if settings.log_checkpoints == "none" else UPLOAD_TIMEOUT_S
    kept = KeptCheckpoints(run.folder / "wandb" / "checkpoints")
    logger = WandbLogger(settings, kept, best=best)
    thread = InThread(
        "Weights & Biases",
        logger,
        opening_s=timeout,
        timeout_s=timeout,
        remedy=remedy_of(run.folder),
        kept=kept,
        log_checkpoints=settings.log_checkpoints,
        reads_later=True,
        awaited_s=awaited_s,
    )
    logger.progress, logger.later = progress, thread.later
    return thread


def _names_wandb(user: object) -> bool:
    """Whether a callback's or a loss's code, or its module, names ``wandb``."""
    kind = type(user)
    codes = [code for one in kind.__mro__ for each in vars(one).values() if (code := getattr(each, "__code__", None))]
    return hasattr(sys.modules.get(kind.__module__), "wandb") or any("wandb" in code.co_names for code in codes)


def _itself(logger: Logger) -> Logger:
    return logger
