"""What a loop is told: the keywords of ``Accumulator``, with every check of a number or a name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypedDict

from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from distaccum.accumulation.loader_factory import loss_to_rehearse
from distaccum.accumulation.spikes import Spikes
from distaccum.accumulation.tracker import Schedule
from distaccum.config.checks import (
    NONFINITE,
    ON_DIVERGENCE,
    require,
    require_choice,
    require_count,
    require_relations,
    require_seed,
    require_verify,
    whole_number,
)
from distaccum.config.compile import CompileConfig
from distaccum.config.engine import EngineConfig, engine_config
from distaccum.config.precision import PrecisionConfig
from distaccum.data.plan.batch import check_sizes
from distaccum.data.plan.units import VIRTUAL_RANKS
from distaccum.data.prefetch import FEWEST
from distaccum.distributed.world import World
from distaccum.engines.context import EngineContext
from distaccum.engines.factory import prepare
from distaccum.engines.numerics import Numerics
from distaccum.losses.base import AnyLoss, Loss
from distaccum.losses.normalize import Count

_WHOLE = ("max_skips", "prefetch", "prefetch_windows", "seed")
_SIZES = ("global_batch_size", "micro_batch_size", "tokens")


class AccumulatorKeywords(TypedDict, total=False):
    """The fields of :class:`AccumulatorSettings`, for type checkers of a call."""

    global_batch_size: int | None
    micro_batch_size: int | str | None
    tokens: int | None
    count: Count | None
    loss: AnyLoss | None
    scheduler: LRScheduler | Sequence[LRScheduler] | None
    schedule: Schedule | None
    clip_norm: float | None
    clip_value: float | None
    nonfinite: str
    max_skips: int
    on_spike: str
    spike_zscore: float
    spike_window: int
    engine: str | EngineConfig
    precision: str | PrecisionConfig
    compile: str | CompileConfig
    seed: int
    prefetch: int
    prefetch_windows: int
    verify: str | int
    verify_allow: Sequence[str]
    on_divergence: str
    numerics: str
    virtual_ranks: int


@dataclass(frozen=True, kw_only=True)
class AccumulatorSettings:
    """The keywords of ``Accumulator``, which describes them; whole numbers are ``int`` here.

    Raises:
        ConfigError: sizes or names that cannot work.
    """

    global_batch_size: int | None = None
    micro_batch_size: int | str | None = None
    tokens: int | None = None
    count: Count | None = None
    loss: AnyLoss | None = None
    scheduler: LRScheduler | Sequence[LRScheduler] | None = None
    schedule: Schedule | None = None
    clip_norm: float | None = None
    clip_value: float | None = None
    nonfinite: str = "stop"
    max_skips: int = 10
    on_spike: str = "off"
    spike_zscore: float = 6.0
    spike_window: int = 100
    engine: str | EngineConfig = "ddp"
    precision: str | PrecisionConfig = "fp32"
    compile: str | CompileConfig = "none"
    seed: int = 0
    prefetch: int = 2
    prefetch_windows: int = 1
    verify: str | int = "first"
    verify_allow: Sequence[str] = ()
    on_divergence: str = "stop"
    numerics: str = "fast"
    virtual_ranks: int = VIRTUAL_RANKS

    def __post_init__(self) -> None:
        """Checks each, and takes a rehearsed loss's count where there is none."""
        both = self.schedule is not None and self.schedulers
        shown = [type(one).__name__ for one in self.schedulers]
        require(not both, "scheduler", shown, "and a schedule too", "Give one")
        require_choice("nonfinite", self.nonfinite, NONFINITE)
        for key in _WHOLE:
            object.__setattr__(self, key, whole_number(key, getattr(self, key)))
        require_count("max_skips", self.max_skips, least=1)
        problem, remedy = f"must be at least {FEWEST}", "One is computed while one is on its way"
        require(self.prefetch >= FEWEST, "prefetch", self.prefetch, problem, remedy)
        require_count("prefetch_windows", self.prefetch_windows)
        require_seed("seed", self.seed)
        require_verify("verify", self.verify)
        require_relations("verify_allow", self.verify_allow)
        require_choice("on_divergence", self.on_divergence, ON_DIVERGENCE)
        self.spikes()
        engine_config(self.engine)
        PrecisionConfig.of(self.precision)
        if self.rehearsed is not None and self.count is None:
            object.__setattr__(self, "count", self.rehearsed.count)
        micro_batch_size = self.sizes["micro_batch_size"]
        if micro_batch_size is not None:
            check_sizes(self.sizes["global_batch_size"], micro_batch_size)

    @cached_property
    def schedulers(self) -> Sequence[LRScheduler]:
        """Torch's, as a list."""
        if isinstance(self.scheduler, Sequence):
            return list(self.scheduler)
        return [self.scheduler] if self.scheduler else []

    @cached_property
    def rehearsed(self) -> Loss | None:
        """What a rehearsal runs; None where the micro-batch is given."""
        return loss_to_rehearse(self.micro_batch_size, self.loss)

    @property
    def counts_beforehand(self) -> bool:
        """Whether a window is counted before its first forward."""
        return self.count is not None

    @property
    def rehearses(self) -> bool:
        """Whether the micro-batch is found in a rehearsal."""
        return self.rehearsed is not None

    @cached_property
    def sizes(self) -> dict[str, int | None]:
        """The sizes, by name; a micro-batch that is still to be found is not given yet."""
        given = {key: getattr(self, key) for key in _SIZES}
        if self.rehearses:
            given["micro_batch_size"] = None
        return {key: None if value is None else whole_number(key, value) for key, value in given.items()}

    def spikes(self) -> Spikes | None:
        """What judges the gradient norms; None with ``on_spike="off"``."""
        return Spikes.of(self.on_spike, zscore=self.spike_zscore, window=self.spike_window)

    def splits_batches(self, ranks: int) -> bool:
        """Whether the global batch is not one forward's on one rank, as far as the sizes say."""
        return ranks > 1 or self.sizes["global_batch_size"] != self.sizes["micro_batch_size"]

    def prepare(self, model: nn.Module, world: World) -> EngineContext:
        """The settings of the engine, checked against the model; see ``engines.factory.prepare``."""
        context = EngineContext(
            engine=engine_config(self.engine),
            precision=PrecisionConfig.of(self.precision),
            clip_norm=self.clip_norm,
            clip_value=self.clip_value,
            global_batch_size=self.sizes["global_batch_size"],
            micro_batch_size=self.sizes["micro_batch_size"],
            world_size=world.size,
            device=world.device,
            seed=self.seed,
            compile=CompileConfig.of(self.compile),
            numerics=Numerics.of(self.numerics, self.virtual_ranks),
        )
        return prepare(model, context)
