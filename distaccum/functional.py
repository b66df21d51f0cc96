"""Level 1: the helpers that an exact, hand-written loop calls.

::

    windows = plan_windows(dataset, world, global_batch_size=64, micro_batch_size=8, count=count)   # plan the windows
    engine = create_engine(model, optimizer, world, precision="fp16", clip_norm=1.0)
    for window in windows(epoch):
        engine.begin_window(len(window.micro_batches), window.assignment)  # needed when the forward is a collective
        for i, micro in enumerate(window.micro_batches):
            with (
                keyed_random(engine, window, i),                                        # where the model draws: dropout
                engine.micro_step(sync=i == len(window.micro_batches) - 1),             # toggle the sync
            ):
                with engine.autocast():
                    loss = loss_sum(engine.model, to_device(micro.batch, world.device))
                engine.backward(normalize_loss(loss, window.counts, engine.gradient_divide_factor))   # divide once
        finish_step(engine, window)                                                     # finish the step
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from distaccum.accumulation.restart import Restarting
from distaccum.accumulation.step import Outcome
from distaccum.config.checks import require_choice, require_count, require_seed, whole_number
from distaccum.data.batches import to_device
from distaccum.data.factory import as_loader
from distaccum.data.hooks import BeforeStep, WindowHook
from distaccum.data.plan.batch import BatchPlan
from distaccum.data.plan.units import VIRTUAL_RANKS
from distaccum.data.window import Window
from distaccum.distributed.world import World
from distaccum.engines.base import Engine, StepOutput
from distaccum.engines.factory import create_engine
from distaccum.engines.numerics import Numerics
from distaccum.errors import MisuseError, UndividedLossWarning
from distaccum.losses.base import AnyLoss, from_mean, is_window_loss
from distaccum.losses.cross_entropy import count_labels, cross_entropy
from distaccum.losses.normalize import Count, WatchedCounts, normalize_loss
from distaccum.program import MEANS, load

__all__ = [
    "BatchPlan",
    "count_labels",
    "create_engine",
    "cross_entropy",
    "finish_step",
    "from_mean",
    "keyed_random",
    "normalize_loss",
    "plan_windows",
    "run_window",
    "to_device",
]


def plan_windows(
    data: Any,
    world: World,
    *,
    global_batch_size: int | None = None,
    micro_batch_size: int,
    count: Count,
    tokens: int | None = None,
    seed: int = 0,
    prefetch_windows: int = 1,
    numerics: str = "fast",
    virtual_ranks: int = VIRTUAL_RANKS,
    verify: str = "first",
) -> Callable[[int], Iterator[Window]]:
    """A function from an epoch's number to its windows, each counted over all ranks by one small all-reduce.

    Args:
        data: a ``DataLoader``, a dataset or a ``DataSpec``, planned over the ranks; any other iterable as this rank's
            own stream of micro-batches, of any length.
        world: this rank.
        global_batch_size: samples per optimizer step over all ranks.
        micro_batch_size: the most samples one forward/backward on one rank takes.
        count: the count of a batch, read on the host. Windows that count nothing are skipped.
        tokens: tokens per optimizer step in place of ``global_batch_size``, for a ``DataSpec`` with its samples'
            lengths.
        seed: for the order of samples, and for the random numbers of micro-steps.
        prefetch_windows: windows that the loading processes of a ``DataLoader`` have ahead; 0: as torch has it.
        numerics: as the engine's; with ``reproducible`` micro-batches are units, the same on any number of ranks.
        virtual_ranks: the blocks in which a reproducible window is summed; the most ranks.
        verify: whether :func:`finish_step` judges by the graphs of the losses of the ``first`` window that none is a
            mean that is given as a sum; or ``never``.

    Raises:
        ConfigError: sizes that cannot work.
    """
    require_choice("verify", verify, ("first", "never"))
    own = Numerics.of(numerics, virtual_ranks)
    given = {"global_batch_size": global_batch_size, "micro_batch_size": micro_batch_size, "tokens": tokens}
    sizes: dict[str, Any] = {key: None if value is None else whole_number(key, value) for key, value in given.items()}
    seed, prefetch_windows = whole_number("seed", seed), whole_number("prefetch_windows", prefetch_windows)
    require_seed("seed", seed)
    require_count("prefetch_windows", prefetch_windows)
    loader = as_loader(data, world, **sizes, seed=seed, prefetch_windows=prefetch_windows, arrange=own.plan)
    counter = own.counter(world, count)

    read = [verify == "never"]  # whether the losses' graphs have been

    def windows(epoch: int) -> Iterator[Window]:
        for window in loader.windows(epoch, 0, counter):
            if any(window.counts.values()):
                counts = WatchedCounts(window.counts)
                if not read[0]:
                    read[0], counts.means = True, load(MEANS)(window)
                yield replace(window, counts=counts)

    return windows


def keyed_random(engine: Engine, window: Window, i: int) -> AbstractContextManager[None]:
    """Around the ``i``-th micro-step of ``window``: torch's random numbers in it, such as those of dropout, are keyed.

    They depend on the seed, the epoch and the micro-batch, and not on the rank that computes it or on what was drawn
    before. Afterwards the generators go on as if nothing had been drawn. Without it each rank draws its own numbers.
    """
    return engine.facts.numerics.random(engine.device).keyed(window.keys, i)


def finish_step(engine: Engine, window: Window) -> StepOutput:
    """Unscales, clips, steps and zeroes in place, after the last micro-step of ``window``; a collective.

    A rank without a micro-batch in the window takes part in the reduction here. Where the gradient is NaN or infinite
    on any rank, no optimizer steps: the result's ``applied`` is False, and a schedule should not step either. The loop
    decides how many of those in a row are too many.

    Raises:
        MisuseError: this rank could not compute its gradient, and no rank has stepped; or losses were normalized with
            another factor than the engine's.
        VerificationError: in the first window, a loss is a mean and was normalized as a sum; on all ranks.
    """
    if window.assignment is not None and not engine.facts.numerics.fixed_order:
        problem = "the window was planned with numerics=reproducible, and the engine is not"
        raise MisuseError(f"{problem}: give create_engine(numerics=...) what plan_windows() was given")
    if not window.micro_batches:
        engine.shadow_micro_step()
    elif isinstance(window.counts, WatchedCounts):
        _check_division(window.counts, engine.gradient_divide_factor)
    with engine.finishing():
        if isinstance(window.counts, WatchedCounts) and window.counts.means is not None:
            window.counts.means.check(engine.world, closing="plan_windows(verify='never') trains without this check")
        output = engine.step()
    _raise_fault(output)
    return output


def _check_division(counts: WatchedCounts, factor: int) -> None:
    """Raises MisuseError, or warns where a constant may be the count, of what is seen at no cost."""
    remedy = "engine.backward(normalize_loss(loss_sum, window.counts, engine.gradient_divide_factor))"
    if not counts.read:
        problem = "nobody has read window.counts: are the losses divided by the window's count on all ranks?"
        warnings.warn(f"{problem} Write {remedy}", UndividedLossWarning, stacklevel=3)
    wrong = counts.factors - {factor}
    if wrong:
        problem = f"losses were normalized with the factor {wrong.pop()}, and this engine divides by {factor}"
        raise MisuseError(f"{problem}. Write {remedy}")


def run_window(
    engine: Engine, window: Window, loss: AnyLoss, *, prefetch: int = 2, before_step: Callable[[], None] | None = None
) -> Outcome:
    """Computes the exact gradient of the window's global mean loss, and steps.

    Args:
        engine: owns the model, the gradients and the step.
        window: its counts must be known.
        loss: gives a sum for each micro-batch; or, as a ``WindowLoss``, for the window.
        prefetch: micro-batches on the device at once, the one being computed included; at least 2.
        before_step: called between the last backward and the step, as to set the learning rate.

    Raises:
        MisuseError: as :func:`finish_step`.
    """
    hook = WindowHook() if before_step is None else BeforeStep(lambda _: before_step())
    engine.hooks.add(hook)
    try:
        if is_window_loss(loss):
            from distaccum.accumulation.two_pass import represented  # noqa: PLC0415  few losses compare samples

            second = represented(engine, window, loss, prefetch=prefetch, compared=False)
            outcome = second.outcome(Restarting(engine).run(window, second, prefetch=prefetch))
        else:
            outcome = Restarting(engine).run(window, loss, prefetch=prefetch)
    finally:
        engine.hooks.remove(hook)
    if outcome.step is not None:
        _raise_fault(outcome.step)
    return outcome


def _raise_fault(output: StepOutput) -> None:
    """Raises MisuseError if this rank could not compute its gradient; waits for the device where only that can tell."""
    why = output.fault or (output.complaint if output.late_faults and not output.applied else "")
    if why:
        raise MisuseError(why)
