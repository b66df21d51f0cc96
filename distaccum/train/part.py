"""What does something for a run from beside the loop: the base class of its parts, and the alert of a loss scale."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distaccum.accumulation.step import Outcome
from distaccum.data.window import Window

if TYPE_CHECKING:
    from distaccum.train.loop import Loop


class Part:
    """Inherit from it, and write the methods you want; the loop calls them in the order of its parts.

    Every rank has the same parts in the same order, so each method but ``on_window`` may be a collective.
    """

    def begins(self, run: Loop) -> None:
        """Before the first window."""

    def window_begins(self, run: Loop, window: Window) -> None:
        """A window is about to run; a forward may change its batches."""

    def on_window(self, run: Loop, window: Window, outcome: Outcome) -> None:
        """The window has run, perhaps not yet on the device, of which nothing is read here."""

    def on_outcome(self, run: Loop, outcome: Outcome) -> None:
        """It is known whether the window was applied; its record, and the callbacks, come after this."""

    def between_windows(self, run: Loop) -> None:
        """What was due after the window is done; the next one is not loaded yet."""

    def before_save(self, run: Loop) -> None:
        """A checkpoint is about to be saved."""

    def windows_ended(self, run: Loop) -> None:
        """After the last window, whose record and checkpoint may still be due."""

    def leaves(self, run: Loop) -> None:
        """As :meth:`windows_ended`, once a run that is preempted has saved."""


class LossScaleAlert(Part):
    """Alerts the loggers when the loss scale falls to its minimum."""

    def __init__(self) -> None:
        self._before = 0.0

    def on_outcome(self, run: Loop, outcome: Outcome) -> None:
        """Compares the scale with that of the window before."""
        lowest, before = run.min_loss_scale, self._before
        self._before = outcome.loss_scale
        if lowest is not None and outcome.loss_scale <= lowest < before:
            text = f"it has fallen to its minimum, {lowest:g}, at step {run.known_progress.step}"
            run.alert("the loss scale has collapsed", text)
