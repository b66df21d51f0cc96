"""What does something for a run from beside the loop: the base class of its parts, and three small ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from distaccum.accumulation.progress import Progress
from distaccum.accumulation.step import Outcome
from distaccum.config.checks import EPOCH
from distaccum.data.plan.batch import Plan
from distaccum.data.plan.stream import StreamPlan
from distaccum.data.window import Window
from distaccum.errors import MisuseError
from distaccum.train.callbacks import Callback, Run, watches_updates

if TYPE_CHECKING:
    from distaccum.train.loop import Loop


@dataclass(frozen=True, kw_only=True)
class Done:
    """A window that ran, of which it is known whether it was applied.

    Args:
        window: its samples and counts.
        outcome: how it went.
        progress: of the run, which includes it.
        lr: the learning rate that it ran with; None: that of the optimizers now, which is read where it is needed.
    """

    window: Window
    outcome: Outcome
    progress: Progress
    lr: float | None = None


class Every:
    """When something is due: after every so many updates, or after the last one of each epoch.

    Args:
        every: how many; 0: never; or ``epoch``.
        plan: of the data to train on.
    """

    def __init__(self, every: Any, plan: Plan | StreamPlan) -> None:
        self._every, self._plan, self.by_epoch = every, plan, every == EPOCH
        self._windows = (-1, 0)  # of an epoch, by its number

    def __call__(self, progress: Progress) -> bool:
        """After an update with this progress."""
        if not self.by_epoch:
            return bool(self._every) and progress.step % self._every == 0
        assert not self._plan.is_stream
        if self._windows[0] != progress.epoch:  # O(samples) where windows are cut by tokens
            self._windows = progress.epoch, self._plan.epoch(progress.epoch).windows_per_epoch
        return progress.epoch_window == self._windows[1]


class Part:
    """Inherit from it, and write the methods you want; the loop calls them in the order of its parts.

    Every rank has the same parts in the same order, so each method but ``on_window`` and ``fails`` may be a collective.
    """

    watches = False
    """Whether it has to know of every window at once whether it was applied: the host then waits for each."""

    trouble = ""
    """What went wrong without ending the run; it stands in the status."""

    by_epoch = False
    """Whether something is due at each epoch's end, so that the host waits there."""

    def due(self, progress: Progress) -> bool:
        """Whether there is something to do after an update with this progress, so that the host waits for it."""
        return False

    def wants_record(self, progress: Progress) -> bool:
        """Whether the update with this progress gets a record."""
        return False

    def owes(self, run: Loop) -> bool:
        """Whether an epoch that is over gets a record, as its last window was no update."""
        return False

    def begins(self, run: Loop) -> None:
        """Before the first window."""

    def window_begins(self, run: Loop, window: Window) -> None:
        """A window is about to run; a forward may change its batches."""

    def on_window(self, run: Loop, window: Window, outcome: Outcome) -> None:
        """The window has run, perhaps not yet on the device, of which nothing is read here."""

    def on_update(self, run: Loop, done: Done) -> None:
        """The window was applied."""

    def on_skip(self, run: Loop, done: Done) -> None:
        """The window was not applied."""

    def adds(self, run: Loop, done: Done | None) -> Mapping[str, Any]:
        """What a record holds of this part; None: the record is an evaluation's alone."""
        return {}

    def on_eval(self, run: Loop, results: Mapping[str, float]) -> None:
        """An evaluation is made."""

    def on_checkpoint(self, run: Run, path: Path) -> None:
        """A checkpoint is complete; ``run.progress`` is the checkpoint's."""

    def before_save(self, run: Loop) -> None:
        """A checkpoint is about to be saved."""

    def resumes(self, run: Loop) -> None:
        """Training goes on after a pause, whose time is no window's."""

    def between_windows(self, run: Loop) -> None:
        """All that was due after a window is done; the next one is not loaded yet."""

    def epoch_ended(self, run: Loop) -> None:
        """An epoch is over, with all that its last window was owed, and the run goes on; that may be no update."""

    def windows_ended(self, run: Loop) -> None:
        """After the last window, all that it was owed included."""

    def preempted(self, run: Loop) -> None:
        """After :meth:`windows_ended`, if another process is to continue the run; there is little time."""

    def leaves(self, run: Loop) -> None:
        """After :meth:`windows_ended`, once a run that is preempted has saved."""

    def ends(self, run: Loop) -> None:
        """The run is trained to its end: what is due there, unless it was done anyway."""

    def on_end(self, run: Loop, results: Mapping[str, float]) -> None:
        """All is done, and ``results`` is the last evaluation."""

    def fails(self, run: Loop, error: BaseException) -> None:
        """An error ends the run; other ranks may be gone, unless it is one that all ranks raise together."""


class Called(Part):
    """A callback of the user's.

    Args:
        callback: called where its methods' names say.
        optimizers: whose learning rates it leaves alone.
    """

    def __init__(self, callback: Callback, optimizers: Sequence[Optimizer]) -> None:
        self._callback, self._optimizers = callback, optimizers
        self.watches = watches_updates(callback)

    def on_update(self, run: Loop, done: Done) -> None:
        """See :class:`~distaccum.train.callbacks.Callback`; so are the others."""
        self._call(lambda: self._callback.on_update(run, done.outcome))

    def on_skip(self, run: Loop, done: Done) -> None:
        """Calls it."""
        self._call(lambda: self._callback.on_skip(run, done.outcome))

    def on_eval(self, run: Loop, results: Mapping[str, float]) -> None:
        """Calls it."""
        self._call(lambda: self._callback.on_eval(run, results))

    def on_checkpoint(self, run: Run, path: Path) -> None:
        """Calls it."""
        self._call(lambda: self._callback.on_checkpoint(run, path))

    def on_end(self, run: Loop, results: Mapping[str, float]) -> None:
        """Calls it."""
        self._call(lambda: self._callback.on_end(run, results))

    def _call(self, method: Callable[[], None]) -> None:
        """Calls a method.

        Raises:
            MisuseError: it sets a learning rate, which the schedule would set again before the next step.
        """
        before = self._learning_rates()
        method()
        if self._learning_rates() != before:
            problem = f"{type(self._callback).__name__} sets a learning rate by hand"
            remedy = "give the callback the property lr_factor, or state the rate as a schedule"
            raise MisuseError(f"{problem}, which the schedule sets before every step: {remedy}")

    def _learning_rates(self) -> list[Any]:
        rates = [group["lr"] for optimizer in self._optimizers for group in optimizer.param_groups]
        return [(id(rate), rate._version) if isinstance(rate, Tensor) else rate for rate in rates]  # no device is read


class LossScaleAlert(Part):
    """Alerts the loggers when the loss scale falls to its minimum.

    Args:
        lowest: the scale does not fall below; None where there is none.
    """

    def __init__(self, lowest: float | None) -> None:
        self._lowest, self._before = lowest, 0.0

    def on_update(self, run: Loop, done: Done) -> None:
        """Compares the scale with that of the window before."""
        scale, before = done.outcome.loss_scale, self._before
        self._before = scale
        if self._lowest is not None and scale <= self._lowest < before:
            text = f"it has fallen to its minimum, {self._lowest:g}, at step {run.known_progress.step}"
            run.alert("the loss scale has collapsed", text)

    on_skip = on_update
