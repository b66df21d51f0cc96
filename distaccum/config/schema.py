"""The settings: frozen dataclasses that are the schema of ``conf/``.

A group whose content is the user's to choose (model, data, loss, schedule, ``optim.optimizer``) is a plain mapping with
a ``_target_``; everything else is typed here and checked in ``__post_init__``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from multiprocessing import get_all_start_methods
from pathlib import Path
from typing import Any, Optional, cast, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf import errors as oc

from distaccum.config.checks import (
    AUTO,
    BACKENDS,
    DOCUMENTS,
    NONFINITE,
    NUMERICS,
    ON_DIVERGENCE,
    ON_SPIKE,
    REPRODUCIBLE,
    ROLLBACK,
    bytes_of,
    is_one_of,
    require,
    require_annotated,
    require_choice,
    require_count,
    require_group,
    require_positive,
    require_stage,
    require_type,
    require_verify,
    seconds_of,
)
from distaccum.config.compile import CompileConfig
from distaccum.config.elastic import ElasticConfig
from distaccum.config.engine import DDPConfig, engine_config, settings_of, unknown_setting
from distaccum.config.precision import PrecisionConfig
from distaccum.errors import ConfigError, near_misses

# What an evaluation gives beside its numbers: texts that the model writes.


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Texts that a language model goes on with at every evaluation.

    Args:
        samples: how many texts; 0: none.
        prompts: what they begin with, in turn; none: the first held-out samples.
        prompt_tokens: how many tokens of a held-out sample are the prompt.
        max_new_tokens: how many tokens follow; a text ends before that with the tokenizer's end token.
        temperature: by which the logits are divided before a token is drawn; 0: the likeliest token is taken.
        seed: of what is drawn, which is the same at every evaluation.
    """

    samples: int = 0
    prompts: list[str] = field(default_factory=list)
    prompt_tokens: int = 32
    max_new_tokens: int = 64
    temperature: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        require_annotated("eval", self)
        require_count("eval.samples", self.samples, off="0 for no texts")
        for key, value in (("prompt_tokens", self.prompt_tokens), ("max_new_tokens", self.max_new_tokens)):
            require(value >= 1, f"eval.{key}", value, "must be at least 1", "Give a number of tokens")
        finite = math.isfinite(self.temperature) and self.temperature >= 0
        require(finite, "eval.temperature", self.temperature, "out of range", "Use 0 or a positive number")
        require(0 <= self.seed < 2**63, "eval.seed", self.seed, "out of range", "Use a whole number from 0 to 2**63-1")
        asked = not self.prompts or self.samples >= len(self.prompts)
        problem = f"and there are {len(self.prompts)} prompts, each of which begins a text"
        require(asked, "eval.samples", self.samples, problem, "Give at least as many samples as prompts")


Node = dict[str, Any]
MICRO_SIZE = 8  # where nobody states one
WANDB_MODES = ("offline", "online", "disabled")
WANDB_CONSOLES = ("off", "wrap", "auto", "redirect", "wrap_raw", "wrap_emu")
LOGGED_CHECKPOINTS = ("none", "best", "all")


def conf_dir() -> Path:
    """The YAML groups: packaged inside an installed distaccum, at the top of a checkout."""
    package = Path(__file__).parents[1]
    return package / "conf" if (package / "conf").is_dir() else package.parent / "conf"


def _adamw() -> Node:
    return {"_target_": "torch.optim.AdamW", "betas": [0.9, 0.95], "weight_decay": 0.1}


def _cosine() -> Node:
    return {"_target_": "distaccum.train.schedules.Cosine", "warmup_steps": 60, "final_ratio": 0.05}


# OmegaConf reads `Optional[X]` but not `X | None` in schemas on every version supported, hence the noqa marks.
def _with_numbers(stage: Any) -> Any:
    """A stage whose numbers may be those of ${oc.env:...}, which are text."""
    if not isinstance(stage, dict):
        return stage
    return {key: int(one) if isinstance(one, str) and one.isdecimal() else one for key, one in stage.items()}


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """The global batch, in samples or in tokens, and the most samples of one forward and backward.

    Args:
        global_size: samples per update, over all ranks.
        tokens: a budget of tokens per update instead (``batch=tokens``).
        micro_size (int | auto): the most samples of one forward and backward on one rank. ``auto``: found in a
            rehearsal before the first window, by rate and memory. null: ``auto`` where the main job runs on GPUs, else
            8, or the global batch where that is less.
        micro_tokens (int | auto | null): the most padded tokens of one forward and backward on one rank, the number of
            its samples times the length of the longest; ``micro_size`` holds too where it is a number, and otherwise
            says no more than the samples of an evaluation's micro-batch. ``auto``: found in a rehearsal of the longest
            samples. null: no such limit.
        group_by_length: samples of similar length in one micro-batch, within a window.
        pad_rows: a micro-batch of fewer samples than the others is filled up with rows that count nothing.
        packing (none | documents): ``documents``: those of a micro-batch share rows without padding, each on its own.
        row_tokens: of a row of packed documents; null: as many as the longest has.
        schedule (list of mappings): the global batches that a run begins with, before it goes on with ``global_size``:
            each has its ``global_size`` and how long it holds, as ``updates``, ``samples`` or ``tokens``.
        unit_size: with ``numerics=reproducible`` the samples of a unit, the micro-batch that is the same on any number
            of ranks; null: ``micro_size``.
        virtual_ranks: with ``numerics=reproducible`` the blocks in which a window is summed; the most ranks.
    """

    global_size: Optional[int] = 32  # noqa: UP045
    tokens: Optional[int] = None  # noqa: UP045
    micro_size: Any = None  # a number, or auto, once it is made; with micro_tokens a number or null
    micro_tokens: Any = None
    group_by_length: bool = False
    pad_rows: bool = False
    packing: str = "none"
    row_tokens: Optional[int] = None  # noqa: UP045
    schedule: list[Node] = field(default_factory=list)
    unit_size: Optional[int] = None  # noqa: UP045
    virtual_ranks: int = 32

    def __post_init__(self) -> None:
        if isinstance(self.schedule, list | tuple):
            object.__setattr__(self, "schedule", [_with_numbers(stage) for stage in self.schedule])
            for i, stage in enumerate(self.schedule):
                require_stage(f"batch.schedule.{i}", stage)
        require_annotated("batch", self)
        problem, remedy = f"and batch.tokens={self.tokens} is a budget of tokens", "Use batch.global_size with it"
        require(not self.schedule or self.tokens is None, "batch.schedule", self.schedule, problem, remedy)
        self._check_micro_tokens()
        require_count("batch.virtual_ranks", self.virtual_ranks, least=1)
        self._take_unit_size()
        if self.micro_size is None and self.micro_tokens is None:
            object.__setattr__(self, "micro_size", self._usual_micro_size)
        if isinstance(self.micro_size, str) and self.micro_size.isdecimal():  # of ${oc.env:...}
            object.__setattr__(self, "micro_size", int(self.micro_size))
        if not is_one_of((AUTO,), self.micro_size) and self.limits_samples:
            require_type("batch.micro_size", self.micro_size, int)
        require_choice("batch.packing", self.packing, ("none", DOCUMENTS))
        packs = self.packing == DOCUMENTS
        problem, remedy = "rows are packed, not sorted by length", "Leave one of them out"
        require(not (packs and self.group_by_length), "batch.group_by_length", True, problem, remedy)
        if self.row_tokens is not None:
            require_count("batch.row_tokens", self.row_tokens, least=1)
            problem = "and batch.packing=none has no rows of several documents"
            require(packs, "batch.row_tokens", self.row_tokens, problem, "Use batch.packing=documents")

    def _take_unit_size(self) -> None:
        """A unit is a micro-batch."""
        key, size = "batch.unit_size", self.unit_size
        if size is None:
            return
        require_count(key, size, least=1)
        problem = f"and batch.micro_tokens={self.micro_tokens} says what a unit is"
        require(self.micro_tokens is None, key, size, problem, "State one of them")
        if self.micro_size is None or is_one_of((AUTO,), self.micro_size):
            object.__setattr__(self, "micro_size", size)
        problem, remedy = f"and batch.micro_size={self.micro_size}, which is the same", "State one of them"
        require(self.micro_size == size, key, size, problem, remedy)

    def _check_micro_tokens(self) -> None:
        key, most = "batch.micro_tokens", self.micro_tokens
        if isinstance(most, str) and most.isdecimal():  # of ${oc.env:...}
            object.__setattr__(self, "micro_tokens", most := int(most))
        if most is None:
            return
        if not is_one_of((AUTO,), most):
            require_type(key, most, int)
            require_count(key, most, least=1)
        problem = "and batch.packing=documents packs a number of samples into rows"
        require(self.packing != DOCUMENTS, key, most, problem, "Use batch.micro_size with it, or batch.packing=none")
        problem = "and batch.pad_rows=true fills micro-batches up to one number of samples"
        require(not self.pad_rows, key, most, problem, "Use batch.micro_size with it, or batch.pad_rows=false")
        if is_one_of((AUTO,), self.micro_size):  # the tokens are the limit
            object.__setattr__(self, "micro_size", None)

    @property
    def limits_samples(self) -> bool:
        """Whether a micro-batch has a most number of samples: not with ``micro_tokens`` alone."""
        return self.micro_tokens is None or self.micro_size is not None

    @property
    def _usual_micro_size(self) -> int:
        return MICRO_SIZE if self.global_size is None else min(MICRO_SIZE, self.global_size)

    @property
    def rehearses(self) -> bool:
        """Whether the micro-batch is found in a rehearsal."""
        return is_one_of((AUTO,), self.micro_size) or is_one_of((AUTO,), self.micro_tokens)

    @property
    def first_micro_size(self) -> int:
        """``micro_size``; without one what evaluations use; before a rehearsal what a plan is made with."""
        stated = self.limits_samples and not is_one_of((AUTO,), self.micro_size)
        return int(self.micro_size) if stated else self._usual_micro_size


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimizer, the peak of its rate, clipping and parameter groups.

    Args:
        lr: the schedule's peak.
        clip_norm: largest norm of the global gradient; null: off, or room for ``optim.clip_value``.
        clip_value: instead of it the largest absolute value of an element; null: off.
        fused (auto | true | false): unscaling, clipping and step in one pass of the optimizer's own kernel; ``auto``:
            where the device has one.
        optimizer: the optimizer, by ``_target_``; its rate is ``optim.lr``.
        groups (list of mappings): parameters with settings of their own, in order: the first that fits a parameter
            takes it. Each has ``match`` (globs over the names of parameters), ``dims`` (numbers of dimensions) or both;
            next to them the settings, as the optimizer's groups have them (``lr`` is a rate, not a factor), or another
            ``optimizer`` for these.
    """

    lr: float = 3e-3
    clip_norm: Optional[float] = 1.0  # noqa: UP045
    clip_value: Optional[float] = None  # noqa: UP045
    fused: Any = "auto"
    optimizer: Node = field(default_factory=_adamw)
    groups: list[Node] = field(default_factory=list)

    def __post_init__(self) -> None:
        for i, group in enumerate(self.groups if isinstance(self.groups, list | tuple) else ()):
            require_group(f"optim.groups.{i}", group)
        require_annotated("optim", self)
        require_positive("optim.lr", self.lr)
        require_positive("optim.clip_norm", self.clip_norm)
        require_positive("optim.clip_value", self.clip_value)
        both = self.clip_norm is not None and self.clip_value is not None
        remedy = "Set one of them to null"
        require(not both, "optim.clip_value", self.clip_value, f"and optim.clip_norm={self.clip_norm} too", remedy)
        require_choice("optim.fused", self.fused, ("auto", True, False))
        rate = self.optimizer.get("lr", self.lr)
        problem = f"and optim.lr={self.lr}, the peak of the schedule, would take its place"
        require(rate == self.lr, "optim.optimizer.lr", rate, problem, "State the rate as optim.lr alone")


@dataclass(frozen=True, kw_only=True)
class LoaderConfig:
    """How the processes of ``trainer.num_workers`` load, under the names of torch's ``DataLoader``.

    Args:
        prefetch_factor: micro-batches ahead in each process, where that is more than ``trainer.prefetch_windows``;
            null: 2.
        persistent_workers: whether the processes stay from epoch to epoch; null: they do.
        timeout: seconds without a batch that are an error; null: none are.
        multiprocessing_context (fork | spawn | forkserver | null): how processes start; null: as Python does.
        pin_memory: whether batches are pinned as they are loaded; null: on a GPU.
    """

    prefetch_factor: Optional[int] = None  # noqa: UP045
    persistent_workers: Optional[bool] = None  # noqa: UP045
    timeout: Optional[float] = None  # noqa: UP045
    multiprocessing_context: Optional[str] = None  # noqa: UP045
    pin_memory: Optional[bool] = None  # noqa: UP045

    def __post_init__(self) -> None:
        require_annotated("trainer.loader", self)
        require_count("trainer.loader.prefetch_factor", self.prefetch_factor, least=1)
        require_positive("trainer.loader.timeout", self.timeout)
        if self.multiprocessing_context is not None:
            known = tuple(get_all_start_methods())
            require_choice("trainer.loader.multiprocessing_context", self.multiprocessing_context, known)


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """The length of the run, its intervals in updates, and what it does when something goes wrong.

    Args:
        max_steps: applied updates; the earlier of this and ``trainer.max_epochs`` ends the run; 0: evaluate the weights
            that it starts from, alone.
        max_epochs: epochs; null: no limit.
        max_time (duration | null): save and end before this time is over, for another process to continue
            (``12:00:00``, ``90s``, ``12h``); null: no limit.
        log_every: updates between two records.
        eval_every: updates between two evaluations; 0: none.
        eval_samples: the most samples of a held-out set, its first ones; null: all.
        num_workers: data-loading processes per rank.
        prefetch_windows: windows that they load ahead; 0: what ``trainer.loader.prefetch_factor`` says.
        host_memory (size | null): the most that a rank's window and what is loaded ahead of it may take, as ``4GiB``;
            null: no limit.
        loader: how these processes load.
        prefetch: micro-batches on the device at once, the one being computed included; at least 2.
        nonfinite (stop | skip): a NaN or infinite gradient: ``stop`` the run or ``skip`` its window; in fp16 the loss
            scale falls first.
        max_skips: skips in a row that stop a run, with nowhere left for a loss scale to go.
        verify (first | never | int): windows that prove their gradient before their step: the ``first``, that and one
            every so many, or ``never``.
        on_divergence (stop | warn): ranks whose weights or optimizer state differ: ``stop`` the run or ``warn``.
        on_spike (off | warn | skip | rollback): a gradient norm that stands out: nothing (``off``), ``warn``, ``skip``
            its window, or ``rollback`` to the last checkpoint.
        spike_zscore: standard deviations above the mean by which a norm stands out.
        spike_window: windows before it that the mean is of; half as many are enough to begin.
        hang_timeout (auto | duration | null): no progress on any rank for so long: the run names the ranks that
            stopped, and ends. ``auto``: ten times the longest pause so far, five minutes at least; null: never.
        group_timeout (duration): when a collective itself gives up; longer than any save or evaluation.
        threads: of a CPU, for each rank's kernels; null: as many as torch has, and with ``numerics=reproducible`` on a
            CPU 1, as its numbers depend on it.
        backend (auto | nccl | gloo): what carries a GPU's tensors between ranks: ``nccl`` (``auto``), or ``gloo``, over
            which ranks may share a GPU; a CPU's go over gloo.
    """

    max_steps: Optional[int] = 300  # noqa: UP045
    max_epochs: Optional[int] = None  # noqa: UP045
    max_time: Any = None
    log_every: int = 10
    eval_every: int = 50
    eval_samples: Optional[int] = None  # noqa: UP045
    num_workers: int = 0
    prefetch_windows: int = 1
    host_memory: Any = None
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    prefetch: int = 2
    nonfinite: str = "stop"
    max_skips: int = 10
    verify: Any = "first"
    on_divergence: str = "stop"
    on_spike: Any = "off"
    spike_zscore: float = 6.0
    spike_window: int = 100
    hang_timeout: Any = "auto"
    group_timeout: Any = "30m"
    threads: Optional[int] = None  # noqa: UP045
    backend: str = "auto"

    def __post_init__(self) -> None:
        require_annotated("trainer", self)
        require_count("trainer.threads", self.threads, least=1)
        require_count("trainer.max_steps", self.max_steps, off="0 to evaluate alone")
        require_count("trainer.max_epochs", self.max_epochs, least=1)
        if self.max_time is not None:
            seconds_of("trainer.max_time", self.max_time)
        require_count("trainer.log_every", self.log_every, least=1)
        require_count("trainer.eval_every", self.eval_every, off="0 to switch evaluation off")
        require_count("trainer.eval_samples", self.eval_samples, least=1)
        require_count("trainer.num_workers", self.num_workers)
        require_count("trainer.prefetch_windows", self.prefetch_windows)
        if self.host_memory is not None:
            bytes_of("trainer.host_memory", self.host_memory)
        require_count("trainer.prefetch", self.prefetch, least=2)
        require_choice("trainer.nonfinite", self.nonfinite, NONFINITE)
        require_count("trainer.max_skips", self.max_skips, least=1)
        require_verify("trainer.verify", self.verify)
        require_choice("trainer.on_divergence", self.on_divergence, ON_DIVERGENCE)
        if self.on_spike is False:  # what YAML makes of a plain off
            object.__setattr__(self, "on_spike", "off")
        require_choice("trainer.on_spike", self.on_spike, (*ON_SPIKE, ROLLBACK))
        require_positive("trainer.spike_zscore", self.spike_zscore)
        require_count("trainer.spike_window", self.spike_window, least=2)
        require_choice("trainer.backend", self.backend, BACKENDS)
        longest = seconds_of("trainer.group_timeout", self.group_timeout)
        if not is_one_of((None, "auto"), self.hang_timeout):
            fits = seconds_of("trainer.hang_timeout", self.hang_timeout) < longest
            problem = f"not below trainer.group_timeout={self.group_timeout}, when the ranks that wait give up"
            require(fits, "trainer.hang_timeout", self.hang_timeout, problem, "Raise trainer.group_timeout too")
        unbounded = self.max_steps is None and self.max_epochs is None
        require(not unbounded, "trainer.max_steps", "null", "and trainer.max_epochs is null too", "State one of them")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are made, and which are kept.

    Args:
        every: updates between two checkpoints; 0: none.
        every_minutes: one more so many minutes after the last, by rank 0's clock; null: none.
        keep: the newest checkpoints to keep; 0: all.
        background (auto | true | false): train on while a checkpoint is written, from a copy in host memory; ``auto``:
            where the engine can, and the copies of a machine's ranks take at most half of the memory it has left.
        best: a result of the evaluation, as ``eval_loss``, whose best checkpoint is kept too; ``best.json`` names it;
            null: none.
        best_mode (min | max): which value of ``checkpoint.best`` is the best.
    """

    every: int = 50
    every_minutes: Optional[float] = None  # noqa: UP045
    keep: int = 2
    background: Any = AUTO
    best: Optional[str] = None  # noqa: UP045
    best_mode: str = "min"

    def __post_init__(self) -> None:
        require_annotated("checkpoint", self)
        require_choice("checkpoint.background", self.background, (True, False, AUTO))
        require_positive("checkpoint.every_minutes", self.every_minutes)
        require_choice("checkpoint.best_mode", self.best_mode, ("min", "max"))
        saves = self.best is None or self.saves
        require(saves, "checkpoint.best", self.best, "and checkpoint.every=0 saves nothing", "Give a number of updates")
        require_count("checkpoint.every", self.every, off="0 to save none")
        require_count("checkpoint.keep", self.keep, off="0 to keep all")

    @property
    def saves(self) -> bool:
        """Whether there are checkpoints at all."""
        return self.every != 0 or self.every_minutes is not None


@dataclass(frozen=True, kw_only=True)
class WandbConfig:
    """Weights & Biases. What is null is left to W&B's environment variables, then to the default.

    Args:
        mode (offline | online | disabled | null): ``offline`` needs no key and no network; ``online`` takes the key
            from the environment; null: ``WANDB_MODE``, or ``offline``.
        project: the W&B project; null: ``WANDB_PROJECT``, or ``distaccum``.
        entity: the W&B user or team; null: ``WANDB_ENTITY``, or the key's own.
        name: the W&B run's name; null: ``WANDB_NAME``, or one that W&B makes up.
        group: runs that belong together; null: ``WANDB_RUN_GROUP``.
        job_type: as ``train`` or ``eval``; null: ``WANDB_JOB_TYPE``.
        notes: a text beside the run; null: ``WANDB_NOTES``.
        tags: its tags; null: ``WANDB_TAGS``.
        dir: of W&B's own files; null: ``WANDB_DIR``, or the run directory.
        console (off | wrap | auto | redirect | wrap_raw | wrap_emu | null): what W&B keeps of the printed lines; null:
            ``WANDB_CONSOLE``, or ``off``.
        save_code: the Python files below the working directory; null: ``WANDB_SAVE_CODE``, or ``false``.
        log_checkpoints (none | best | all): checkpoints that are uploaded as artifacts.
    """

    mode: Optional[str] = None  # noqa: UP045
    project: Optional[str] = None  # noqa: UP045
    entity: Optional[str] = None  # noqa: UP045
    name: Optional[str] = None  # noqa: UP045
    group: Optional[str] = None  # noqa: UP045
    job_type: Optional[str] = None  # noqa: UP045
    notes: Optional[str] = None  # noqa: UP045
    tags: Optional[list[str]] = None  # noqa: UP045
    dir: Optional[str] = None  # noqa: UP045
    console: Optional[str] = None  # noqa: UP045
    save_code: Optional[bool] = None  # noqa: UP045
    log_checkpoints: str = "none"

    def __post_init__(self) -> None:
        require_annotated("metrics.wandb", self)
        for key, value, choices in (("mode", self.mode, WANDB_MODES), ("console", self.console, WANDB_CONSOLES)):
            if value is not None:
                require_choice(f"metrics.wandb.{key}", value, choices)
        require_choice("metrics.wandb.log_checkpoints", self.log_checkpoints, LOGGED_CHECKPOINTS)


@dataclass(frozen=True, kw_only=True)
class TensorBoardConfig:
    """TensorBoard.

    Args:
        enabled: whether records go to it; its files are in ``tensorboard/`` of the run directory.
    """

    enabled: bool = False

    def __post_init__(self) -> None:
        require_annotated("metrics.tensorboard", self)


@dataclass(frozen=True, kw_only=True)
class MLflowConfig:
    """MLflow. What is null is left to MLflow's environment variables, then to the default.

    Args:
        enabled: whether records go to it.
        tracking_uri: of its server or store; null: ``MLFLOW_TRACKING_URI``, or MLflow's own default.
        experiment: its experiment; null: ``MLFLOW_EXPERIMENT_NAME``, or ``distaccum``.
        run_name: its run's name; null: the name of the run directory.
        tags: names with values.
        log_checkpoints (none | best | all): checkpoints that are kept as artifacts of the run.
    """

    enabled: bool = False
    tracking_uri: Optional[str] = None  # noqa: UP045
    experiment: Optional[str] = None  # noqa: UP045
    run_name: Optional[str] = None  # noqa: UP045
    tags: dict[str, str] = field(default_factory=dict)
    log_checkpoints: str = "none"

    def __post_init__(self) -> None:
        require_annotated("metrics.mlflow", self)
        require_choice("metrics.mlflow.log_checkpoints", self.log_checkpoints, LOGGED_CHECKPOINTS)


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    """The loggers; ``metrics.jsonl`` is always written. Any number of the others may be on.

    Args:
        console: records on the console.
        report: ``report.html`` in the run directory, when the run ends.
        windows: ``windows.jsonl`` in the run directory: of every window what it held and computed, bit by bit, for
            ``distaccum compare``.
        summary_depth: how deep the modules are that the header shows of the model; 0: none.
        peak_tflops: 1e12 operations a second of one rank's card, for MFU; null: by the card's name, and on a CPU none.
        flops_per_sample: operations of one sample, forward and backward; null: counted.
        wandb: Weights & Biases.
        tensorboard: TensorBoard.
        mlflow: MLflow.
        loggers: further ones by name, each with a ``_target_``.
    """

    console: bool = True
    report: bool = True
    windows: bool = False
    summary_depth: int = 1
    peak_tflops: Optional[float] = None  # noqa: UP045
    flops_per_sample: Optional[float] = None  # noqa: UP045
    wandb: WandbConfig = field(default_factory=WandbConfig)
    tensorboard: TensorBoardConfig = field(default_factory=TensorBoardConfig)
    mlflow: MLflowConfig = field(default_factory=MLflowConfig)
    loggers: Node = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_annotated("metrics", self)
        require_count("metrics.summary_depth", self.summary_depth, off="0 to show none")
        require_positive("metrics.peak_tflops", self.peak_tflops)
        require_positive("metrics.flops_per_sample", self.flops_per_sample)
        for name, node in self.loggers.items():
            remedy = f"Write metrics.loggers.{name}._target_=package.module.Name"
            require(isinstance(node, dict), f"metrics.loggers.{name}", node, "names no class", remedy)

    def check_checkpoints(self, checkpoint: CheckpointConfig) -> None:
        """Raises ConfigError where checkpoints are to be logged of which there are none."""
        for tracker, settings in (("wandb", self.wandb), ("mlflow", self.mlflow)):
            key, wanted = f"metrics.{tracker}.log_checkpoints", settings.log_checkpoints
            saves = wanted == "none" or checkpoint.saves
            require(saves, key, wanted, "and checkpoint.every=0 saves none", "Give a number of updates, or use none")
            named = wanted != "best" or checkpoint.best is not None
            remedy = "Give checkpoint.best=eval_loss, for example, or use all"
            require(named, key, wanted, "and checkpoint.best names no result of the evaluation", remedy)


@dataclass(frozen=True, kw_only=True)
class InitConfig:
    """In what the files of ``init_from`` may differ from the model; all else is refused.

    Args:
        missing: globs of the model's names that the files need not have: they keep the values that the model was built
            with.
        unexpected: globs of names in the files that the model has not: they are left out.
    """

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        require_annotated("init", self)


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Which windows are profiled, and what is written of them beside the table of phases.

    Args:
        steps (list[int] | null): the first and the last window, both included, in the count of those that this
            process runs, from 1 on; null: none.
        trace: torch's trace of each rank.
        memory: on a GPU, a snapshot of its allocator.
        nvtx: on a GPU, ranges for Nsight Systems.
        with_stack: the trace has the lines of source.
        shapes: the trace has the shapes of tensors.
    """

    steps: Any = None
    trace: bool = True
    memory: bool = False
    nvtx: bool = False
    with_stack: bool = False
    shapes: bool = False

    def __post_init__(self) -> None:
        require_annotated("profile", self)
        if self.steps is None:
            for name in ("memory", "nvtx", "with_stack", "shapes"):
                problem = "and profile.steps is null, so that nothing is profiled"
                require(not getattr(self, name), f"profile.{name}", True, problem, "Add profile.steps=[10,14]")
            return
        steps = self.steps
        whole = isinstance(steps, list | tuple) and all(type(one) is int for one in steps)
        holds = whole and len(steps) == 2 and 1 <= steps[0] <= steps[1]  # noqa: PLR2004  the first and the last
        problem, remedy = "is not the numbers of the first and the last window, from 1 on", "Give two, as in [10,14]"
        require(holds, "profile.steps", steps, problem, remedy)
        for name in ("with_stack", "shapes"):
            problem = "is a part of the trace, and profile.trace=false leaves that out"
            require(self.trace or not getattr(self, name), f"profile.{name}", True, problem, "Leave one of the two out")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Every setting of a run.

    Args:
        seed: of weights, order and dropout.
        numerics (fast | reproducible): ``reproducible``: a run's numbers are the same bit for bit on any number of
            ranks.
        deterministic: kernels that give the same bits in every run; one that has no such form ends the run.
        resume (never | auto | path): ``never``, the newest valid checkpoint of the run directory (``auto``), or a
            checkpoint's path.
        resume_allow: settings, or the beginnings of their keys, that may differ from the checkpoint's although they
            change what its state means.
        init_from (path | null): weights to start from, a safetensors file or a folder with one; optimizer and progress
            start from zero. With ``resume=auto`` it counts only while there is no checkpoint.
        batch: whether the global batch is stated in samples or in tokens.
        engine: who owns parameters, gradients and the step.
        precision: the number format.
        compile: what ``torch.compile`` is given.
        model: the model, by ``_target_``.
        data: the data, by ``_target_``.
        loss: the loss, by ``_target_``.
        optim: the optimizer, its rate, clipping and groups.
        schedule: a factor of ``optim.lr`` by applied updates, by ``_target_``.
        trainer: the length of the run, and its intervals.
        callbacks: callbacks by name, each with a ``_target_``.
        checkpoint: when checkpoints are made, and which are kept.
        metrics: the loggers.
        init: in what the files of ``init_from`` may differ from the model.
        profile: windows whose time is looked at.
        eval: texts that the model writes at evaluations.
        elastic: what an elastic job does where ranks are lost or come.
        objective (str | list[str] | null): what a sweeper is given of the run: the name of a result of the last
            evaluation or of a number of the last record, or several names; null: ``eval_loss``, where there is an
            evaluation.
    """

    seed: int = 0
    numerics: str = "fast"
    deterministic: bool = False
    objective: Any = None
    resume: str = "never"
    resume_allow: list[str] = field(default_factory=list)
    init_from: Optional[str] = None  # noqa: UP045
    batch: BatchConfig = field(default_factory=BatchConfig)
    engine: Any = field(default_factory=DDPConfig)  # an EngineConfig: OmegaConf has no union of dataclasses
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    model: Node = field(default_factory=dict)
    data: Node = field(default_factory=dict)
    loss: Node = field(default_factory=dict)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: Node = field(default_factory=_cosine)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    callbacks: Node = field(default_factory=dict)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    init: InitConfig = field(default_factory=InitConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    elastic: ElasticConfig = field(default_factory=ElasticConfig)

    def __post_init__(self) -> None:
        for name in ("missing", "unexpected"):
            globs = getattr(self.init, name, [])
            needed = self.init_from is not None or not globs
            require(needed, f"init.{name}", globs, "and init_from is null, so that nothing is read", "State init_from")
        for name, made in (("engine", engine_config), ("precision", PrecisionConfig.of), ("compile", CompileConfig.of)):
            object.__setattr__(self, name, made(getattr(self, name)))  # which may be a name
        require_annotated("", self)
        named = [self.objective] if isinstance(self.objective, str | None) else self.objective
        texts = isinstance(named, list | tuple) and named and all(isinstance(one, str | None) for one in named)
        remedy = "Give one, as eval_loss, or several, as [eval_loss,tokens_per_s]"
        require(bool(texts), "objective", self.objective, "is not a name", remedy)
        require_choice("numerics", self.numerics, NUMERICS)
        self._check_units()
        rolls_back = self.trainer.on_spike == ROLLBACK
        problem = "and checkpoint.every=0 saves nothing to roll back to"
        saves = not rolls_back or self.checkpoint.saves
        require(saves, "trainer.on_spike", self.trainer.on_spike, problem, "Give a number of updates, or use skip")
        self.metrics.check_checkpoints(self.checkpoint)
        require(0 <= self.seed < 2**63, "seed", self.seed, "out of range", "Use a whole number from 0 to 2**63-1")
        if self.resume not in ("never", "auto"):
            exists = Path(self.resume).is_dir()
            require(exists, "resume", self.resume, "no such checkpoint folder", "Use never, auto or an existing path")
            problem = f"and resume={self.resume} has weights too"
            require(self.init_from is None, "init_from", self.init_from, problem, "Leave one of them out")

    @property
    def reproducible(self) -> bool:
        """Whether its numbers are the same on any number of ranks."""
        return self.numerics == REPRODUCIBLE

    def _check_units(self) -> None:
        size, remedy = self.batch.unit_size, "Use numerics=reproducible, or state batch.micro_size"
        used = size is None or self.reproducible
        require(used, "batch.unit_size", size, "and numerics=fast knows no units", remedy)
        found = self.reproducible and self.batch.rehearses
        problem = "is found by rate and memory, and with numerics=reproducible a run's numbers depend on it"
        key = "batch.micro_tokens" if is_one_of((AUTO,), self.batch.micro_tokens) else "batch.micro_size"
        require(not found, key, AUTO, problem, "State a number, as batch.unit_size")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RunConfig:
        """The configuration of nested plain values, by the keys of ``conf/``; what is left out has its default.

        An engine, a precision or what to compile may be given by its name alone.

        Raises:
            ConfigError: an unknown key, or a value of the wrong type or out of range.
        """
        return _from_plain(values)


def _writable(node: Any) -> Any:
    """Removes OmegaConf's read-only flag of frozen dataclasses at every depth, so that YAML can be merged."""
    if isinstance(node, DictConfig):
        OmegaConf.set_readonly(node, False)
        for key in node:
            _writable(node._get_node(key))
    return node


def plain(node: DictConfig) -> Node:
    """A composed Hydra node as plain values, interpolations resolved.

    Raises:
        ConfigError: a required value was left out, or an interpolation leads nowhere.
    """
    try:
        return cast(Node, OmegaConf.to_container(node, resolve=True, throw_on_missing=True))
    except oc.OmegaConfBaseException as error:
        raise translate(error) from error


def _without_defaults_of_others(schema: DictConfig, node: Mapping[str, Any]) -> DictConfig:
    """Empties the schema's node where ``node`` names a ``_target_``: its defaults are not for that target."""
    optim, schedule = node.get("optim"), node.get("schedule")
    optimizer = optim.get("optimizer") if isinstance(optim, Mapping) else None
    for key, given in (("optim.optimizer", optimizer), ("schedule", schedule)):
        if isinstance(given, Mapping) and "_target_" in given:
            OmegaConf.update(schema, key, {}, merge=False)
    return schema


def _from_plain(node: Mapping[str, Any]) -> RunConfig:
    named = {key: {"name": node[key]} for key in ("engine", "precision", "compile") if isinstance(node.get(key), str)}
    node = {**node, **named}
    if is_dataclass(node.get("engine", "")) and not isinstance(node["engine"], type):
        node["engine"] = asdict(engine_config(node["engine"]))
    engine_schema = settings_of(_name_of(node))
    try:
        schema = _without_defaults_of_others(_writable(OmegaConf.structured(RunConfig)), node)
        OmegaConf.update(schema, "batch.micro_size", None)  # OmegaConf reads the defaults of a made BatchConfig
        OmegaConf.update(schema, "engine", OmegaConf.structured(engine_schema), merge=False)
        typed = OmegaConf.merge(_writable(schema), node)
    except oc.OmegaConfBaseException as error:
        raise translate(error, node) from error
    return cast(RunConfig, _construct(RunConfig, OmegaConf.to_container(typed), engine=engine_schema))


def _name_of(node: Mapping[str, Any]) -> Any:
    """The name of the node's engine."""
    engine = node.get("engine", "ddp")
    return engine.get("name", "ddp") if isinstance(engine, Mapping) else engine


def _construct(schema: type, values: Any, **chosen: type) -> Any:
    """Makes the frozen dataclass of plain values, with some fields' types ``chosen``.

    OmegaConf's own conversion loses the errors that ``__post_init__`` raises.
    """
    hints = get_type_hints(schema) | chosen
    return schema(**{k: _construct(hints[k], v) if is_dataclass(hints[k]) else v for k, v in values.items()})


def translate(error: oc.OmegaConfBaseException, node: Mapping[str, Any] | None = None) -> ConfigError:
    """The ConfigError for an error of OmegaConf; the value is looked up in ``node``."""
    key = str(error.full_key or "")
    value = None if node is None else OmegaConf.select(OmegaConf.create(dict(node), flags={"allow_objects": True}), key)
    first_line = str(error.msg or error).splitlines()[0]
    match error:
        case oc.MissingMandatoryValue():
            key = key or first_line.rsplit(" ", 1)[-1]
            return ConfigError(key, "???", "is required and was not given", f"Add {key}=... to the command line")
        case oc.ConfigKeyError() | oc.ConfigAttributeError():
            return unknown_key(key, value, _name_of(node or {}))
        case oc.InterpolationResolutionError():
            return ConfigError(key, value, first_line, "Choose groups that go together, or state the value yourself")
        case oc.UnsupportedValueType():
            return ConfigError(key, value, first_line, "Give a number, a text, a list or a mapping")
        case oc.ValidationError():
            return ConfigError(key, value, first_line, "Give a value of the type named")
        case _:
            return ConfigError(key or "configuration", value, first_line, "Correct this value")


def unknown_key(key: str, value: object, engine: str, known: Iterable[str] | None = None) -> ConfigError:
    """The ConfigError for a setting that ``engine`` does not have, with similar names.

    ``known`` are the names of all settings; by default those of all files in ``conf/``.
    """
    group, _, setting = key.partition(".")
    if group == "engine" and setting:
        return unknown_setting(engine, setting, value)
    hint = near_misses(key, _known_keys() if known is None else known)
    return ConfigError(key, value, f"no such setting{hint}", "`--cfg job` prints all settings there are")


def _known_keys() -> list[str]:
    """The dotted names of all settings in the YAML groups."""
    names: dict[str, None] = {}
    for path in sorted(conf_dir().rglob("*.yaml")):
        if path.parent.name == "sweeps":  # in W&B's own format
            continue
        group = "" if path.parent == conf_dir() else f"{path.parent.name}."
        names |= dict.fromkeys([group.rstrip("."), *dotted(OmegaConf.to_container(OmegaConf.load(path)), group)])
    return list(names)


def dotted(node: Any, prefix: str = "") -> list[str]:
    """The names of all settings in nested plain values, as ``optim.lr``."""
    found = []
    for key, value in node.items() if isinstance(node, dict) else ():
        found += [f"{prefix}{key}", *dotted(value, f"{prefix}{key}.")]
    return found
