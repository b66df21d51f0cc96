"""Tracks progress, learning rate and skipped steps, and ends a run whose gradients stay NaN or infinite."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain
from math import inf
from typing import Protocol

import torch
from torch import Tensor

from distaccum.accumulation.progress import Progress
from distaccum.accumulation.schedulers import OwnedScheduler
from distaccum.accumulation.spikes import Spikes
from distaccum.accumulation.step import Outcome
from distaccum.data.counter import GlobalCounter
from distaccum.data.window import Window
from distaccum.distributed.activity import Phase
from distaccum.engines.base import Engine, StepOutput
from distaccum.engines.modules import HostCopy, trained
from distaccum.errors import MisuseError, NonFiniteError, SpikeError, UntrainedParameterWarning, shorten
from distaccum.losses.base import Loss

# Names parameters that the loss never gave a gradient: a frozen branch, a head no loss uses, a detached path.

WINDOWS = 16  # looked at


class UntrainedParameters:
    """Adds up the gradients' norms on the device over the first windows, and looks at the sum once.

    A gradient of 0.0 counts as none: an engine whose gradients are buckets has one for every parameter.

    Args:
        names: of the parameters that need a gradient.
        windows: to look at.
    """

    def __init__(self, names: Iterable[str], windows: int = WINDOWS) -> None:
        self._untrained = set(names)
        self._left = windows
        self._seen: list[str] | None = None
        self._norms: Tensor | None = None
        self._copy: HostCopy | None = None

    def note(self, step: StepOutput) -> None:
        """Adds one window's step; warns in the window after the last one, when the numbers have arrived."""
        if self._left < 0:
            return
        self._left -= 1
        if self._left < 0:
            self._warn()
            return
        names = list(step.names)
        if self._norms is None:
            self._seen, self._norms = names, step.norms
        elif names == self._seen:
            self._norms = torch.maximum(self._norms, step.norms)
        else:  # used now, and not before, or the other way round
            self._untrained.difference_update(set(names) ^ set(self._seen or ()))
            return
        if self._left == 0:
            self._copy = HostCopy(self._norms)

    def _warn(self) -> None:
        norms = self._copy.read() if self._copy is not None else []
        trained = {name for name, norm in zip(self._seen or (), norms, strict=False) if norm != 0.0}
        if self._copy is None:  # parameters came and went: those that were ever named
            trained = set(self._seen or ())
        names = sorted(self._untrained - trained)
        self._norms = self._copy = None
        if names and trained:
            problem = f"no window has given {shorten(names)} a gradient so far"
            warnings.warn(f"{problem}: set requires_grad=False, or use it in the loss", UntrainedParameterWarning, 2)


_log = logging.getLogger(__name__)
_GIVEN_UP = "gave up its window"  # in place of a fault
_ABANDONED = "with abandon()"
_MOST_NAMED = 16  # sample ids of a rank, or parameters, in a message


class Schedule(Protocol):
    """The factor of the peak learning rate for the update after ``step`` applied ones."""

    def __call__(self, step: int) -> float:
        """The factor, usually in [0, 1]."""


class ProgressTracker:
    """Counts windows and updates, and steps the schedules of applied updates only.

    Whether a step was applied is known on the device first. The host asks for it just before the next step, when the
    device has computed it long ago, so neither waits for the other.

    Args:
        engine: makes the steps.
        schedule: from the number of applied updates to a factor of the learning rate.
        schedulers: torch's, instead; stepped after every applied update.
        skips: whether a NaN or infinite gradient only skips its window; else it ends the run, unless a scale can fall.
        max_skips: windows skipped in a row, at the lowest loss scale, that end the run in any case.
        meet: called on all ranks, with what for, before they tell each other why a gradient was not finite.
        spikes: judges the norms of the gradients; None: nobody does. ``max_skips`` of them in a row end the run, too.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        schedule: Schedule | None,
        schedulers: Sequence[OwnedScheduler],
        skips: bool,
        max_skips: int,
        meet: Callable[[str], object] = lambda _: None,
        spikes: Spikes | None = None,
    ) -> None:
        self._engine, self._world, self._meet = engine, engine.world, meet
        self.spikes, self._most_spikes = spikes, max_skips
        self._too_many_spikes = ""
        self._schedule, self.schedulers = schedule, schedulers
        self._max_skips = max_skips if skips or engine.facts.min_loss_scale is not None else 1
        self._progress = self._known_progress = Progress()
        self.skips_in_a_row = 0
        """Windows whose gradient was not finite at the lowest loss scale; :meth:`restore` begins anew."""
        self._unresolved: tuple[Window, Outcome, Loss | None] | None = None  # the last step, not asked for yet
        self._fatal: tuple[Window, Outcome, Loss | None] | None = None  # the step that ends the run
        self._own_fault: str | None = None  # of the last step, where it was not finite: no rank knows the others'
        self.last: Outcome | None = None
        # Every rank sees the same norms: one of them warns.
        self._untrained = UntrainedParameters(trained(engine.unwrapped_model)) if engine.world.is_main else None

    @property
    def known_progress(self) -> Progress:
        """The progress right after the latest step that was resolved; never waits."""
        return self._known_progress

    @property
    def if_applied(self) -> Progress:
        """Steps and position in the data if the last step was applied; never waits."""
        return self._progress if self._unresolved is None else self._progress.after(samples=0, tokens=0, applied=True)

    @property
    def progress(self) -> Progress:
        """The progress with the last window, whose step this waits for."""
        self.resolve_last_step()
        return self._progress

    def restore(self, progress: Progress) -> None:
        """Continues from saved progress."""
        self._unresolved = self._fatal = self._own_fault = None
        self._too_many_spikes = ""
        self._progress = self._known_progress = progress
        activity = self._world.activity
        activity.window = activity.first = progress.window
        activity.step = progress.step
        self.skips_in_a_row = 0

    def next_epoch(self) -> None:
        """Moves to the start of the next epoch."""
        self._progress = self.progress.next_epoch()

    def mean_loss(self, counter: GlobalCounter) -> float:
        """The last window's loss, each part averaged over its global count; a collective that reads the device.

        Raises:
            MisuseError: before the first window, or on some ranks only.
        """
        if self.last is None:
            raise MisuseError("mean_loss() before the first window: call it after one")
        placed = self.last.placed(self._world.rank)
        own = placed.flatten().tolist()  # host read: the loop asks for it
        found = torch.tensor(counter.sum_together("mean_loss()", own), dtype=placed.dtype)
        totals = found.view(placed.shape).sum(1).tolist()
        means = (total / count for total, count in zip(totals, self.last.counts.values(), strict=True) if count)
        return sum(means, 0.0)

    def next_factors(self) -> list[float]:
        """The schedule's factors that the next step may get: whether the last was applied may be unknown yet."""
        if self._schedule is None:
            return []
        try:
            return [self._schedule(step) for step in sorted({self._progress.step, self.if_applied.step})]
        except Exception:  # the user's own, which begin_step meets too, where it is due
            return []

    def begin_step(self) -> None:
        """Resolves the step before, and sets the learning rate of the one that follows.

        Raises:
            NonFiniteError, SpikeError, MisuseError: as :meth:`raise_if_nonfinite`.
        """
        self.raise_if_nonfinite()
        if self.spikes is not None and self.spikes.skips:
            self._engine.norm_bound = self.spikes.bound
        if self._schedule is not None:
            factor = self._schedule(self._progress.step)
            if not 0 <= factor < inf:
                problem = f"the schedule's factor of the learning rate after {self._progress.step} updates is {factor}"
                raise MisuseError(f"{problem}: let it end at 0, as in max(0.0, 1 - step / total_steps)")
            self._engine.set_lr_factor(factor)

    def end_step(self, window: Window, outcome: Outcome, loss: Loss | None = None) -> None:
        """Notes a window that ran; with ``loss`` it can be run again to find where a NaN began."""
        self.resolve_last_step()
        self._unresolved, self.last = (window, outcome, loss), outcome
        activity = self._world.activity
        activity.window, activity.phase = self._progress.window + 1, Phase.BETWEEN
        if self._untrained is not None and outcome.step is not None:
            self._untrained.note(outcome.step)

    def skip_window(self, samples: int) -> None:
        """Notes a window that counts nothing and was not run, or that was abandoned."""
        self._progress = self.progress.after(samples=samples, tokens=0, applied=False)
        self._world.activity.window = self._progress.window

    def note_given_up(self) -> None:
        """Notes that this rank gave up a window that it had begun, in place of :meth:`end_step`."""
        self._own_fault = f"rank {self._world.rank} {_GIVEN_UP} {_ABANDONED}"

    def resolve_last_step(self) -> None:
        """Asks whether the last step was applied, if nobody has: progress and schedulers then include it."""
        if self._unresolved is None:
            return
        last, self._unresolved = self._unresolved, None
        window, outcome, _ = last
        applied, finite, tokens = outcome.applied, outcome.finite, max(outcome.counts.values())
        self._progress = self._progress.after(samples=window.samples, tokens=tokens, applied=applied, finite=finite)
        self._known_progress = self._progress
        self._world.activity.step = self._progress.step
        for scheduler in self.schedulers if applied else ():
            scheduler.step()
        if self.spikes is not None and outcome.step is not None and self.spikes.note(outcome.step.norm):
            self._tell_of_spike(self.spikes)
        step = outcome.step
        self._own_fault = None if finite or step is None else step.given_up or step.complaint
        lowest = self._engine.facts.min_loss_scale
        if finite or (lowest is not None and outcome.loss_scale > lowest):
            self.skips_in_a_row = 0
            return
        self.skips_in_a_row += 1
        if self.skips_in_a_row >= self._max_skips:
            self._fatal = last

    def _tell_of_spike(self, spikes: Spikes) -> None:
        """Once for windows in a row that spike; those that are skipped may not be too many."""
        what = f"window {self._progress.window} spikes: {spikes.last}"
        if self._world.is_main and spikes.in_a_row == 1:
            _log.warning("%s; it %s", what, "makes no step" if spikes.skips else "is trained on (on_spike=warn)")
        if spikes.skips and spikes.in_a_row >= self._most_spikes:
            self._too_many_spikes = (
                f"{what}. It is the last of {spikes.in_a_row} in a row that were skipped. Weights and optimizer state "
                f"are those of step {self._progress.step}. Look at the data, lower the learning rate, resume from an "
                "earlier checkpoint, or raise spike_zscore or max_skips"
            )

    def raise_if_nonfinite(self, *, together: bool = True) -> None:
        """Resolves the last step, and raises if too many gradients in a row were NaN or infinite, or spiked.

        Args:
            together: all ranks call this, so that the message can tell of all of them: a collective where it raises.
                Otherwise it tells what this rank knows.

        Raises:
            NonFiniteError, SpikeError: on every rank, and once.
            MisuseError: some rank could not compute its gradient; on every rank.
        """
        self.resolve_last_step()
        if self._too_many_spikes:
            explanation, self._too_many_spikes = self._too_many_spikes, ""
            raise SpikeError(explanation)
        if self._own_fault is not None:
            own = [self._own_fault] if self._own_fault else []
            if together:
                self._meet("the next step")
            said = self._world.all_gather_names(own) if together else own
            faults = [one for one in said if _GIVEN_UP not in one]
            if faults:
                raise MisuseError("; ".join(faults))
            if together:
                self._own_fault = None
                self._forgive(said, here=any(one.endswith(_ABANDONED) for one in own))
        if self._fatal is not None:
            explanation = self._explanation(*self._fatal, together=together)
            self._fatal, self.skips_in_a_row = None, 0
            raise NonFiniteError(explanation)

    def _forgive(self, given_up: Sequence[str], *, here: bool) -> None:
        """Takes a window for skipped that is NaN because some rank has given it up, perhaps this one."""
        if given_up and not here:
            self.skips_in_a_row, self._fatal = max(self.skips_in_a_row - 1, 0), None  # 0 where the loss scale falls
            self._progress = replace(self._progress, nonfinite=self._progress.nonfinite - 1)
        if given_up and self._world.is_main:
            _log.warning("%s: no rank has stepped on it", "; ".join(given_up))

    def _explanation(self, window: Window, outcome: Outcome, loss: Loss | None, *, together: bool) -> str:
        assert outcome.step is not None
        self._engine.zero_gradients()  # of a window that may have begun since
        began = ""
        if loss is not None and together:
            from distaccum.program import BEGAN, load  # noqa: PLC0415  where a run ends

            began = f" {load(BEGAN)(self._engine, window, loss, self._world)}."
        ids = shorten(chain.from_iterable(window.ids()), _MOST_NAMED) or "none"
        own = (self._world.rank, ids, outcome.step.nonfinite())  # of gradients, this rank's share
        of_all = sorted(self._world.all_gather_object(own)) if together else [own]
        samples = "; ".join(f"rank {rank}: {ids}" for rank, ids, _ in of_all)
        named = dict.fromkeys(name for _, _, found in of_all for name in found)
        names = shorten(named, _MOST_NAMED) or "none alone, but their norm"
        row = f"{self.skips_in_a_row} in a row, " if self.skips_in_a_row > 1 else ""
        return (
            f"the gradient of window {self._progress.window} is NaN or infinite ({row}loss scale "
            f"{outcome.loss_scale:g}): of {names}.{began} Its samples are {samples}. Weights and optimizer "
            f"state are those of step {self._progress.step}. Look at the data, lower the learning rate, or resume from "
            "an earlier checkpoint"
        )
