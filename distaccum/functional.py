"""Level 1: the four things that an exact loop needs, to be called from a hand-written one.

::

    windows = plan_windows(dataset, world, global_size=64, micro_size=8, count=count)   # plan a window
    engine = wrap(model, optimizer, world, precision="fp16", clip_norm=1.0)
    for window in windows(epoch):
        engine.keep_pace(len(window.micro_batches))     # for engines whose ranks have to run alike many
        for i, micro in enumerate(window.micro_batches):
            with engine.micro_step(sync=i == len(window.micro_batches) - 1):            # toggle the sync
                with engine.autocast():
                    total = loss_sum(engine.model, to_device(micro.batch, world.device))
                engine.backward(weigh(total, window.counts, averages_over=engine.averages_over))  # weigh the loss
        finish_step(engine, window)                                                     # finish the step
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from distaccum.accumulation.step import run_window
from distaccum.config.engine import EngineConfig, engine_config
from distaccum.config.precision import PrecisionConfig
from distaccum.data.counter import Tally
from distaccum.data.factory import feed_of
from distaccum.data.plan.batch import BatchPlan
from distaccum.data.prefetch import to_device
from distaccum.data.window import Window
from distaccum.distributed.world import World
from distaccum.engines import factory as build
from distaccum.engines.base import Engine, StepResult
from distaccum.losses.base import from_mean
from distaccum.losses.cross_entropy import count_labels, cross_entropy
from distaccum.losses.normalize import Count, weigh

__all__ = [
    "BatchPlan",
    "count_labels",
    "cross_entropy",
    "finish_step",
    "from_mean",
    "plan_windows",
    "run_window",
    "to_device",
    "weigh",
    "wrap",
]


def wrap(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    world: World,
    *,
    engine: str | EngineConfig = "ddp",
    precision: str | PrecisionConfig = "fp32",
    clip_norm: float | None = None,
    clip_value: float | None = None,
    global_size: int | None = None,
    micro_size: int | None = None,
    seed: int = 0,
) -> Engine:
    """The engine around a model: its ``micro_step(sync=...)`` toggles the gradient reduction; a collective.

    Args:
        model: moved to this rank's device.
        optimizer: over its parameters; or several, over disjoint sets of them.
        world: this rank.
        engine: by name or with settings.
        precision: the policy, by name or with settings; ``engine.autocast()`` goes around forward and loss.
        clip_norm: largest norm of the global gradient.
        clip_value: instead, largest absolute value of its elements.
        global_size, micro_size: for engines that want to be told.
        seed: of the weights of a model on the meta device.

    Raises:
        ConfigError: no such engine or policy, or an optimizer over other parameters than the model's.
    """
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    return build.wrap(
        model,
        optimizers,
        world,
        engine_config(engine),
        PrecisionConfig.of(precision),
        clip_norm=clip_norm,
        clip_value=clip_value,
        global_size=global_size,
        micro_size=micro_size,
        seed=seed,
    )


def plan_windows(
    data: Any,
    world: World,
    *,
    global_size: int | None = None,
    micro_size: int,
    count: Count,
    tokens: int | None = None,
    seed: int = 0,
) -> Callable[[int], Iterator[Window]]:
    """A function from an epoch's number to its windows, counted over all ranks by one small all-reduce each.

    Args:
        data: a ``DataLoader``, a dataset or a ``Source``, which is planned over the ranks; any other iterable as this
            rank's own stream of micro-batches, of any length.
        world: this rank.
        global_size: samples per optimizer step over all ranks.
        micro_size: the most samples one forward/backward on one rank takes.
        count: what a batch counts, read on the host.
        tokens: a budget of tokens in place of ``global_size``, for a ``Source`` that gives its samples' lengths.
        seed: of the order of samples.

    Raises:
        ConfigError: sizes that cannot work.
    """
    feed = feed_of(data, world, global_size=global_size, tokens=tokens, micro_size=micro_size, seed=seed)
    tally = Tally(world, count)
    return lambda epoch: (window for window in feed.windows(epoch, 0, tally) if any(window.counts.values()))


def finish_step(engine: Engine, window: Window) -> StepResult:
    """Unscales, clips, steps and zeroes in place, after the last micro-step of ``window``; a collective.

    A rank without a micro-batch in the window takes part in the reduction here. Where the gradient is NaN or infinite
    on any rank no optimizer steps: ``applied`` of the result then is False, and a schedule should not step either. How
    many of those in a row are too many is the loop's to say.
    """
    if not window.micro_batches:
        engine.stand_in()
    return engine.step()
