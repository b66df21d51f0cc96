"""What became of the windows that ran: clocks, rates, and what a NaN or infinite gradient leads to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Protocol

import torch

from distaccum.accumulation.diagnose import diagnose, explain
from distaccum.accumulation.progress import Progress
from distaccum.accumulation.schedulers import OwnedScheduler
from distaccum.accumulation.step import Outcome
from distaccum.data.window import Window
from distaccum.distributed.world import World
from distaccum.engines.base import Engine
from distaccum.errors import MisuseError, NonFiniteError
from distaccum.losses.base import Loss

_FEW = 16  # ids of a rank's samples, or names, that a message shows


class Schedule(Protocol):
    """The factor of the peak learning rate for the update after ``step`` applied ones."""

    def __call__(self, step: int) -> float:
        """The factor, usually in [0, 1]."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """A window that ran. ``loss``, where there is one to call, can run it again."""

    window: Window
    outcome: Outcome
    loss: Loss | None = None


class ProgressTracker:
    """Keeps the clocks, and steps the schedules of applied updates only.

    Whether an attempt was applied is known on the device first. It is asked for where the next one is about to step,
    by when the device has long come so far: the host neither waits nor lets the device wait.

    Args:
        engine: whose steps these are.
        world: this rank.
        schedule: from the number of applied updates to a factor of the learning rate.
        schedulers: torch's, instead; stepped after every applied update.
        skips: whether a NaN or infinite gradient is passed over also where no loss scale can fall; or ends the run.
        max_skips: of those in a row, with nowhere left for a loss scale to go, that end the run in any case.
    """

    def __init__(
        self,
        engine: Engine,
        world: World,
        *,
        schedule: Schedule | None,
        schedulers: Sequence[OwnedScheduler],
        skips: bool,
        max_skips: int,
    ) -> None:
        self._engine, self._world = engine, world
        self._schedule, self._schedulers = schedule, schedulers
        self._max_skips = max_skips if skips or engine.min_loss_scale is not None else 1
        self._clocks = self._after_last = Progress()
        self._in_a_row = 0
        self._open: Attempt | None = None  # not asked yet
        self._fatal: Attempt | None = None
        self.last: Outcome | None = None

    @property
    def known_progress(self) -> Progress:
        """The clocks right after the latest attempt that somebody has asked for; nothing waits."""
        return self._after_last

    @property
    def max_possible_step(self) -> int:
        """``step``, if the last attempt was applied; nothing waits."""
        return self._clocks.step + (self._open is not None)

    @property
    def progress(self) -> Progress:
        """The clocks with the last attempt, for whose end this waits."""
        self.resolve_last_step()
        return self._clocks

    def restore(self, progress: Progress) -> None:
        """Goes on from another run's clocks."""
        self._open = self._fatal = None
        self._clocks = self._after_last = progress
        self._in_a_row = 0

    def next_epoch(self) -> None:
        """All windows of the epoch have run."""
        self._clocks = self.progress.next_epoch()

    def mean_loss(self) -> float:
        """The last window's loss, each part averaged over its global count; a collective that reads the device.

        Raises:
            MisuseError: before the first window.
        """
        if self.last is None:
            raise MisuseError("mean_loss() before the first window: call it after one")
        # fp64: a rank without a micro-batch does not know in what the others' losses are computed.
        sums = self._world.all_reduce_(torch.stack(list(self.last.loss_sums.values())).double().unsqueeze(1)).squeeze(1)
        means = (total / count for total, count in zip(sums.tolist(), self.last.counts.values(), strict=True) if count)
        return sum(means, 0.0)

    def begin_step(self) -> None:
        """Before the optimizers step: what came before is settled, and the rates are set.

        Raises:
            NonFiniteError: as :meth:`raise_if_nonfinite`.
        """
        self.raise_if_nonfinite()
        if self._schedule is not None:
            self._engine.set_lr_factor(self._schedule(self._clocks.step))

    def end_step(self, attempt: Attempt) -> None:
        """After they have stepped, or not."""
        self.resolve_last_step()
        self._open, self.last = attempt, attempt.outcome

    def skip_empty_window(self, samples: int) -> None:
        """A window that counts nothing, and was not run."""
        self._clocks = self.progress.after(samples=samples, tokens=0, applied=False)

    def resolve_last_step(self) -> None:
        """Asks what became of the last attempt, if nobody has: clocks and schedulers then include it."""
        if self._open is None:
            return
        attempt, self._open = self._open, None
        outcome, samples = attempt.outcome, attempt.window.samples
        applied, finite, tokens = outcome.applied, outcome.finite, max(outcome.counts.values())
        self._clocks = self._clocks.after(samples=samples, tokens=tokens, applied=applied, finite=finite)
        self._after_last = self._clocks
        for scheduler in self._schedulers if applied else ():
            scheduler.step()
        lowest = self._engine.min_loss_scale
        if finite or (lowest is not None and outcome.loss_scale > lowest):
            self._in_a_row = 0
            return
        self._in_a_row += 1
        if self._in_a_row >= self._max_skips:
            self._fatal = attempt

    def raise_if_nonfinite(self, *, together: bool = True) -> None:
        """Settles the last attempt; a collective where it raises, unless not ``together``: then it says what it knows.

        Raises:
            NonFiniteError: on every rank alike, and once: too many gradients in a row were NaN or infinite.
        """
        self.resolve_last_step()
        if self._fatal is not None:
            explanation = self._explanation(self._fatal, together=together)
            self._fatal, self._in_a_row = None, 0
            raise NonFiniteError(explanation)

    def _explanation(self, attempt: Attempt, *, together: bool) -> str:
        assert attempt.outcome.step is not None
        self._engine.zero_gradients()  # of a window that may have begun since
        names = _few(attempt.outcome.step.nonfinite()) or "none alone, but their norm"
        began = ""
        if attempt.loss is not None and together:
            began = f" {explain(diagnose(self._engine, attempt.window, attempt.loss, self._world))}."
        own = (self._world.rank, _few([*islice(chain.from_iterable(attempt.window.ids()), _FEW + 1)]) or "none")
        texts = self._world.all_gather_names([json.dumps(own)]) if together else [json.dumps(own)]
        samples = "; ".join(f"rank {rank}: {ids}" for rank, ids in sorted(map(json.loads, texts)))
        row = f"{self._in_a_row} in a row, " if self._in_a_row > 1 else ""
        return (
            f"the gradient of window {self._clocks.window} is NaN or infinite ({row}loss scale "
            f"{attempt.outcome.loss_scale:g}): of {names}.{began} Its samples are {samples}. Weights and optimizer "
            f"state are those of step {self._clocks.step}. Look at the data, lower the learning rate, or resume from "
            "an earlier checkpoint"
        )


def _few(things: Sequence[object]) -> str:
    shown = ", ".join(map(str, things[:_FEW]))
    return f"{shown}, ..." if len(things) > _FEW else shown
