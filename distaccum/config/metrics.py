"""The settings of the loggers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional

from distaccum.config.checks import Node, require, require_annotated, require_choice, require_named, require_positive
from distaccum.config.trainer import CheckpointConfig

WANDB_MODES = ("offline", "online", "disabled")
LOGGED_CHECKPOINTS = ("none", "best", "all")

# OmegaConf reads `Optional[X]` but not `X | None` in schemas on every version supported, hence the noqa marks.


@dataclass(frozen=True, kw_only=True)
class WandbConfig:
    """Weights & Biases. What is null is left to W&B's environment variables, and so is all else that W&B can be told.

    Args:
        mode (offline | online | disabled | null): ``offline`` needs no key and no network; ``online`` reads the key
            from the environment. null: ``WANDB_MODE``, or ``offline``.
        project: W&B project. null: ``WANDB_PROJECT``, or ``distaccum``.
        name: Name of the W&B run. null: ``WANDB_NAME``, or one that W&B makes up.
        tags: Tags of the W&B run, such as ``[baseline]``. null: ``WANDB_TAGS``.
        log_checkpoints (none | best | all): Checkpoints that are uploaded as artifacts.
    """

    mode: Optional[str] = None  # noqa: UP045
    project: Optional[str] = None  # noqa: UP045
    name: Optional[str] = None  # noqa: UP045
    tags: Optional[list[str]] = None  # noqa: UP045
    log_checkpoints: str = "none"

    def __post_init__(self) -> None:
        require_annotated("metrics.wandb", self)
        if self.mode is not None:
            require_choice("metrics.wandb.mode", self.mode, WANDB_MODES)
        require_choice("metrics.wandb.log_checkpoints", self.log_checkpoints, LOGGED_CHECKPOINTS)


@dataclass(frozen=True, kw_only=True)
class TensorBoardConfig:
    """TensorBoard.

    Args:
        enabled: Log to TensorBoard, in ``tensorboard/`` of the run directory.
    """

    enabled: bool = False

    def __post_init__(self) -> None:
        require_annotated("metrics.tensorboard", self)


@dataclass(frozen=True, kw_only=True)
class MLflowConfig:
    """MLflow: its environment variables say where it is, and which experiment it is.

    Args:
        enabled: Log to MLflow.
        log_checkpoints (none | best | all): Checkpoints that are uploaded as artifacts.
    """

    enabled: bool = False
    log_checkpoints: str = "none"

    def __post_init__(self) -> None:
        require_annotated("metrics.mlflow", self)
        require_choice("metrics.mlflow.log_checkpoints", self.log_checkpoints, LOGGED_CHECKPOINTS)


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    """The loggers; ``metrics.jsonl`` is always written. Any number of the others may be on.

    Args:
        console: Print log entries on the console.
        report: Write ``report.html`` into the run directory when the run ends.
        windows: Write ``windows.jsonl`` for ``distaccum compare``: each step's samples and numbers, bit by bit.
        peak_tflops: Peak TFLOP/s of one GPU, for MFU, such as 989. null: by the GPU's name; none on a CPU.
        flops_per_sample: Floating point operations of one sample, forward and backward, for MFU. null: counted.
        wandb: Weights & Biases.
        tensorboard: TensorBoard.
        mlflow: MLflow.
        loggers: More loggers by name, each with a ``_target_``.
    """

    console: bool = True
    report: bool = True
    windows: bool = False
    peak_tflops: Optional[float] = None  # noqa: UP045
    flops_per_sample: Optional[float] = None  # noqa: UP045
    wandb: WandbConfig = field(default_factory=WandbConfig)
    tensorboard: TensorBoardConfig = field(default_factory=TensorBoardConfig)
    mlflow: MLflowConfig = field(default_factory=MLflowConfig)
    loggers: Node = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_annotated("metrics", self)
        require_positive("metrics.peak_tflops", self.peak_tflops)
        require_positive("metrics.flops_per_sample", self.flops_per_sample)
        require_named("metrics.loggers", self.loggers)

    def check_checkpoints(self, checkpoint: CheckpointConfig) -> None:
        """Raises ConfigError where checkpoints are to be logged of which there are none."""
        for tracker, settings in (("wandb", self.wandb), ("mlflow", self.mlflow)):
            key, wanted = f"metrics.{tracker}.log_checkpoints", settings.log_checkpoints
            saves = wanted == "none" or checkpoint.saves
            require(saves, key, wanted, "and checkpoint.every=0 saves none", "Give a number of updates, or use none")
            named = wanted != "best" or checkpoint.best is not None
            remedy = "Give checkpoint.best=eval_loss, for example, or use all"
            require(named, key, wanted, "and checkpoint.best names no result of the evaluation", remedy)
