"""One optimizer step over a window whose reduction comes after its last backward, and may fail: ranks may be lost."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from torch import Tensor

from distaccum.accumulation.step import LossSums, Outcome, backward, run_micro_steps
from distaccum.accumulation.two_pass import SecondPass
from distaccum.data.window import Window
from distaccum.distributed.activity import Phase
from distaccum.elastic.engine.ddp import resumable
from distaccum.engines.base import Engine
from distaccum.losses.base import Loss


def run_window(
    engine: Engine,
    window: Window,
    loss: Loss,
    *,
    prefetch: int = 2,
    backward: Callable[[Engine, Tensor], None] = backward,
) -> Outcome:
    """As the core's ``run_window``; the losses of all ranks travel with the gradient, so that each rank has them.

    A rank that is lost before the step then takes no loss with it.
    """
    losses, activity = run_micro_steps(engine, window, loss, prefetch, backward), engine.activity
    if isinstance(loss, SecondPass):  # of no unit: rank 0 has the window's
        losses = LossSums(engine.device)
        losses.add(loss.sums)
    activity.phase, activity.arrived_at = Phase.REDUCTION, perf_counter()
    elastic = resumable(engine)
    elastic.send_along(losses.placed(window.counts, engine.world.rank))
    if window.micro_batches:
        elastic.reduce()
    else:
        engine.shadow_micro_step()
    activity.phase = Phase.STEP
    return losses.outcome(window.counts, engine.step(), elastic.received)
