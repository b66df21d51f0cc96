"""The settings of the global batch and of its micro-batches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

from distaccum.config.checks import (
    AUTO,
    DOCUMENTS,
    Node,
    is_one_of,
    require,
    require_annotated,
    require_choice,
    require_count,
    require_stage,
    require_type,
)

MICRO_SIZE = 8  # where nobody states one
SAMPLES = "samples"

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
        global_size: Samples per optimizer step, over all ranks.
        tokens: Tokens per optimizer step, over all ranks, instead of ``global_size`` (with ``batch=tokens``).
        micro_size (int | auto): Upper limit of a micro-batch in samples, on one rank. ``auto`` finds the fastest that
            fits before the first step. null: ``auto`` if the main job runs on GPUs; else 8, or a smaller global batch.
        micro_tokens (int | auto | null): Upper limit of a micro-batch in tokens after padding (samples x longest
            sample). If ``micro_size`` is a number, both limits apply; if not, it only sets the evaluation batch.
            ``auto`` finds the limit with the longest samples. null: no limit.
        group_by_length: Put samples of similar length into one micro-batch, within a step, to save padding.
        balance (samples | tokens | flops): What ranks get about the same of in a step: samples; or, dealing its
            micro-batches by what they cost, padded ``tokens`` or the model's operations (``flops``).
        pad_rows: Fill smaller micro-batches up to one size with rows that do not count.
        packing (none | documents): ``documents`` puts several samples into a row in place of padding, each on its own.
        row_tokens: Length of a packed row in tokens, such as 4096. null: the longest sample.
        schedule (list of mappings): Smaller global batches at the start of the run, before ``global_size``:
            ``[{global_size: 64, updates: 500}]``. Each has its ``global_size`` and its length in ``updates``,
            ``samples`` or ``tokens``.
        scale_lr (none | sqrt | linear): With ``schedule``: how the learning rate follows the global batch. What is
            configured is for ``global_size``. [More](trainer.md#a-global-batch-that-grows).
        scale_betas: With ``schedule``: forget as much in as many samples: betas, or the momentum, to the power of the
            growth.
        scale_decay: With ``schedule``: decay weights as much in as many samples.
        noise: Log the [gradient noise scale](trainer.md#the-gradient-noise-scale), an estimate of the largest global
            batch that saves steps.
        unit_size: With ``numerics=reproducible``: samples of a unit, the micro-batch that is the same on any number of
            ranks. null: ``micro_size``.
        virtual_ranks: With ``numerics=reproducible``: blocks in which a step is summed; the most ranks.
    """

    global_size: Optional[int] = 32  # noqa: UP045
    tokens: Optional[int] = None  # noqa: UP045
    micro_size: Any = None  # a number, or auto, once it is made; with micro_tokens a number or null
    micro_tokens: Any = None
    group_by_length: bool = False
    balance: str = SAMPLES
    pad_rows: bool = False
    packing: str = "none"
    row_tokens: Optional[int] = None  # noqa: UP045
    schedule: list[Node] = field(default_factory=list)
    scale_lr: str = "none"
    scale_betas: bool = False
    scale_decay: bool = False
    noise: bool = False
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
        require_choice("batch.balance", self.balance, (SAMPLES, "tokens", "flops"))
        require_choice("batch.scale_lr", self.scale_lr, ("none", "sqrt", "linear"))
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
    def scales(self) -> bool:
        """Whether settings of the optimizer follow the global batch."""
        return self.scale_lr != "none" or self.scale_betas or self.scale_decay

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
