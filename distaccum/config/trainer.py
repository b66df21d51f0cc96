"""The settings of what trains: the optimizer, the length of the run, checkpoints, profiles and texts."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from multiprocessing import get_all_start_methods
from typing import Any, Optional

from distaccum.config.checks import (
    AUTO,
    BACKENDS,
    NONFINITE,
    ON_DIVERGENCE,
    ON_SPIKE,
    ROLLBACK,
    Node,
    bytes_of,
    is_one_of,
    require,
    require_annotated,
    require_choice,
    require_count,
    require_group,
    require_interval,
    require_positive,
    require_relations,
    require_type,
    require_verify,
    seconds_of,
    take_digits,
)
from distaccum.config.direction import MODES, mode_of

# How an elastic job deals with ranks that are lost and ranks that come.


@dataclass(frozen=True, kw_only=True)
class ElasticConfig:
    """A job that ``launch/elastic.sh`` has started, whose windows go on where ranks are lost; no other reads it.

    Args:
        min_ranks: Smallest number of ranks that goes on. Fewer wait ten minutes for others; then the run ends.
        rejoin: Replace a process that died by a new one, which joins at the start of a step.
        expel_after (duration): Go on without a rank that has kept the others waiting for this long.
        memory_every: Steps between two checkpoints in memory, for ``fsdp2`` and ``deepspeed``: a run that loses a rank
            restarts from the last one.
    """

    min_ranks: int = 1
    rejoin: bool = True
    expel_after: Any = "30s"
    memory_every: int = 10

    def __post_init__(self) -> None:
        require_annotated("elastic", self)
        require_count("elastic.min_ranks", self.min_ranks, least=1)
        seconds_of("elastic.expel_after", self.expel_after)
        require_count("elastic.memory_every", self.memory_every, least=1)


# OmegaConf reads `Optional[X]` but not `X | None` in schemas on every version supported, hence the noqa marks.


def _adamw() -> Node:
    return {"_target_": "torch.optim.AdamW", "betas": [0.9, 0.95], "weight_decay": 0.1}


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimizer, the peak of its rate, clipping and parameter groups.

    Args:
        lr: Learning rate: the peak of the schedule.
        clip_norm: Clip the norm of the global gradient at this value. null: off.
        clip_value: Clip each element of the gradient at this value, instead of ``optim.clip_norm``. null: off.
        fused (auto | true | false): Unscale, clip and step in one fused kernel. ``auto``: if the device has one.
        optimizer: The optimizer's class as ``_target_``, and its arguments; the learning rate is ``optim.lr``.
        groups (list of mappings): Parameters with settings of their own, such as ``[{match: ['*.bias'], weight_decay:
            0}]``. The first group that matches a parameter takes it, by ``match`` (patterns of names), ``dims``
            (numbers of dimensions) or both. The other keys are the optimizer's (``lr`` is a rate, not a factor), or
            another ``optimizer``.
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
        prefetch_factor: Micro-batches that each process loads ahead, if more than ``trainer.prefetch_windows``. null:
            2.
        persistent_workers: Keep the loading processes from epoch to epoch. null: true.
        timeout: Raise an error after this many seconds without a batch. null: never.
        multiprocessing_context (fork | spawn | forkserver | null): How loading processes start. null: Python's default.
        pin_memory: Pin batches in host memory. null: on GPUs.
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
        max_steps (int | auto | null): Optimizer steps of the run. ``auto``: 300, or no limit if ``trainer.max_epochs``
            sets one; the first limit reached ends the run. 0 only evaluates.
        max_epochs: Epochs of the run. null: no limit.
        max_time (duration | null): Save and stop before this time is over, so that another job can continue:
            ``12:00:00``, ``90s``, ``12h``. null: no limit.
        log_every: Steps between two log entries.
        eval_every (epoch | int): Steps between two evaluations. ``epoch``: after each epoch's last step. 0: none.
        eval_samples: Evaluate on the first samples of each held-out set only, such as 1000. null: all samples.
        num_workers: Data loading processes per rank.
        prefetch_windows: Steps whose data are loaded ahead. 0: as many micro-batches as
            ``trainer.loader.prefetch_factor``.
        host_memory (size | null): Upper limit of a rank's data in host memory, in use or loaded ahead: ``4GiB``. null:
            none.
        loader: How the loading processes work.
        nonfinite (stop | skip): Reaction to a NaN or infinite gradient: ``stop`` the run or ``skip`` the step, in fp16
            after the loss scale has shrunk.
        max_skips: Stop the run after this many skipped steps in a row, once the loss scale cannot shrink any more.
        verify (first | never | int): Steps whose gradient is verified before it is applied: the ``first``, none
            (``never``), or with 1000 the first and every 1000th.
        verify_allow (list[str]): Relations that the program breaks on purpose, which then are not looked at: some of
            ``counts``, ``parts``, ``samples``, ``weights``, ``state``, ``hooks``, ``size``.
        on_divergence (stop | warn): Reaction to ranks whose weights or optimizer state differ: ``stop`` or ``warn``.
        on_spike (off | warn | skip | rollback): Reaction to an unusually large gradient norm: none (``off``), ``warn``,
            ``skip`` the step, or ``rollback`` to the last checkpoint.
        spike_zscore: A norm is a spike if it is this many standard deviations above the mean.
        spike_window: Steps over which the mean is taken; checks begin after half of them.
        hang_timeout (auto | duration | null): End the run, naming the ranks that stopped, after this long without
            progress on any rank. ``auto``: ten times the longest pause so far, at least five minutes. null: never.
        group_timeout (duration): Timeout of a collective, such as ``30m``; longer than any save or evaluation.
        threads: CPU threads per rank. null: torch's default, but 1 with ``numerics=reproducible`` on CPUs.
        backend (auto | nccl | gloo): Communication between GPUs: ``nccl``, or ``gloo``, with which ranks may share a
            GPU. ``auto`` is ``nccl``. CPUs always use gloo.
    """

    max_steps: Any = AUTO
    max_epochs: Optional[int] = None  # noqa: UP045
    max_time: Any = None
    log_every: int = 10
    eval_every: Any = 50
    eval_samples: Optional[int] = None  # noqa: UP045
    num_workers: int = 0
    prefetch_windows: int = 1
    host_memory: Any = None
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    nonfinite: str = "stop"
    max_skips: int = 10
    verify: Any = "first"
    verify_allow: Any = field(default_factory=list)
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
        take_digits(self, "max_steps", "eval_every")
        if not is_one_of((AUTO,), self.max_steps):
            require_type("trainer.max_steps", self.max_steps, Optional[int])  # noqa: UP045
            require_count("trainer.max_steps", self.max_steps, off="0 to evaluate alone")
        require_count("trainer.max_epochs", self.max_epochs, least=1)
        if self.max_time is not None:
            seconds_of("trainer.max_time", self.max_time)
        require_count("trainer.log_every", self.log_every, least=1)
        require_interval("trainer.eval_every", self.eval_every, off="0 to switch evaluation off")
        require_count("trainer.eval_samples", self.eval_samples, least=1)
        require_count("trainer.num_workers", self.num_workers)
        require_count("trainer.prefetch_windows", self.prefetch_windows)
        if self.host_memory is not None:
            bytes_of("trainer.host_memory", self.host_memory)
        require_choice("trainer.nonfinite", self.nonfinite, NONFINITE)
        require_count("trainer.max_skips", self.max_skips, least=1)
        require_verify("trainer.verify", self.verify)
        require_relations("trainer.verify_allow", self.verify_allow)
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

    @property
    def limits(self) -> tuple[int | None, int | None]:
        """The updates and the epochs of which the earlier ends the run."""
        auto = 300 if self.max_epochs is None else None
        return auto if self.max_steps == AUTO else self.max_steps, self.max_epochs


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are made, and which are kept.

    Args:
        every (epoch | int): Steps between two checkpoints. ``epoch``: after each epoch's last step. 0: no checkpoints.
        every_minutes: Also save after this many minutes without a checkpoint, such as 30. null: off.
        keep: Number of newest checkpoints to keep. 0: all.
        background (auto | true | false): Write checkpoints while training goes on, from a copy in host memory.
            ``auto``: if the engine can, and the copies of a machine's ranks fit into half of its free memory.
        best: Also keep the checkpoint with the best value of this metric, such as ``eval_loss``; ``checkpoints/best``
            names it. null: off.
        mode (min | max | null): Direction of ``checkpoint.best``: whether a smaller (``min``) or a larger value
            (``max``) is better. null: by the metric's name, as for a loss or an accuracy; other names need it.
        best_mode: Older name of ``checkpoint.mode``.
    """

    every: Any = 50
    every_minutes: Optional[float] = None  # noqa: UP045
    keep: int = 2
    background: Any = AUTO
    best: Optional[str] = None  # noqa: UP045
    mode: Optional[str] = None  # noqa: UP045
    best_mode: Optional[str] = None  # noqa: UP045

    def __post_init__(self) -> None:
        require_annotated("checkpoint", self)
        take_digits(self, "every")
        require_interval("checkpoint.every", self.every, off="0 to save none")
        require_choice("checkpoint.background", self.background, (True, False, AUTO))
        require_positive("checkpoint.every_minutes", self.every_minutes)
        require_choice("checkpoint.mode", self.mode, (*MODES, None))
        require_choice("checkpoint.best_mode", self.best_mode, (*MODES, None))
        once = None in (self.mode, self.best_mode) or self.mode == self.best_mode
        require(once, "checkpoint.best_mode", self.best_mode, f"and mode={self.mode}", "State checkpoint.mode alone")
        saves = self.best is None or self.saves
        require(saves, "checkpoint.best", self.best, "and checkpoint.every=0 saves nothing", "Give a number of updates")
        require_count("checkpoint.keep", self.keep, off="0 to keep all")

    def mode_of_best(self) -> str:
        """``min`` or ``max``, as it is stated or ``best`` says. Raises ConfigError where neither does."""
        return mode_of("checkpoint.mode", self.best or "", self.mode or self.best_mode)

    @property
    def saves(self) -> bool:
        """Whether there are checkpoints at all."""
        return self.every != 0 or self.every_minutes is not None


@dataclass(frozen=True, kw_only=True)
class InitConfig:
    """In what the files of ``init_from`` may differ from the model; all else is refused.

    Args:
        missing: Names of weights that the files may lack, as patterns such as ``[head.*]``; they keep initial values.
        unexpected: Names of weights in the files that the model does not have, as patterns; they are ignored.
    """

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        require_annotated("init", self)


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Which windows are profiled, and what is written of them beside the table of phases.

    Args:
        steps (list[int] | null): First and last step to profile, such as ``[10,12]``, from this process's first. null:
            none.
        trace: Write torch's trace of each rank.
        memory: Write a snapshot of the GPU's allocator.
        nvtx: Mark phases for Nsight Systems, on GPUs.
        with_stack: Record source lines in the trace.
    """

    steps: Any = None
    trace: bool = True
    memory: bool = False
    nvtx: bool = False
    with_stack: bool = False

    def __post_init__(self) -> None:
        require_annotated("profile", self)
        if self.steps is None:
            for name in ("memory", "nvtx", "with_stack"):
                problem = "and profile.steps is null, so that nothing is profiled"
                require(not getattr(self, name), f"profile.{name}", True, problem, "Add profile.steps=[10,14]")
            return
        steps = self.steps
        whole = isinstance(steps, list | tuple) and all(type(one) is int for one in steps)
        holds = whole and len(steps) == 2 and 1 <= steps[0] <= steps[1]  # noqa: PLR2004  the first and the last
        problem, remedy = "is not the numbers of the first and the last window, from 1 on", "Give two, as in [10,14]"
        require(holds, "profile.steps", steps, problem, remedy)
        problem = "is a part of the trace, and profile.trace=false leaves that out"
        require(self.trace or not self.with_stack, "profile.with_stack", True, problem, "Leave one of the two out")


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Texts that a language model goes on with at every evaluation.

    Args:
        samples: Number of texts to generate at each evaluation. 0: none.
        prompts: Prompts, used in turn, such as ``['Once upon a time']``. Empty: the first held-out samples.
        prompt_tokens: Tokens of a held-out sample that are used as prompt.
        max_new_tokens: Upper limit of generated tokens; the tokenizer's end token ends a text earlier.
        temperature: Sampling temperature. 0: always the most likely token.
    """

    samples: int = 0
    prompts: list[str] = field(default_factory=list)
    prompt_tokens: int = 32
    max_new_tokens: int = 64
    temperature: float = 1.0

    def __post_init__(self) -> None:
        require_annotated("eval", self)
        require_count("eval.samples", self.samples, off="0 for no texts")
        for key, value in (("prompt_tokens", self.prompt_tokens), ("max_new_tokens", self.max_new_tokens)):
            require(value >= 1, f"eval.{key}", value, "must be at least 1", "Give a number of tokens")
        finite = math.isfinite(self.temperature) and self.temperature >= 0
        require(finite, "eval.temperature", self.temperature, "out of range", "Use 0 or a positive number")
        asked = not self.prompts or self.samples >= len(self.prompts)
        problem = f"and there are {len(self.prompts)} prompts, each of which begins a text"
        require(asked, "eval.samples", self.samples, problem, "Give at least as many samples as prompts")
