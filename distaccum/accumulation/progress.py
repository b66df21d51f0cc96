"""The counters that say how far a run has come."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Progress:
    """``step`` counts applied updates and ``window`` attempts, which are the windows that ran.

    The position in the data is ``epoch`` and ``epoch_window``, the windows of that epoch that are done. ``samples``
    and ``tokens`` (what the loss counts) add up over all attempts, ``skipped`` counts the attempts that were not
    applied, and ``nonfinite`` those among them whose gradient was NaN or infinite.
    """

    step: int = 0
    window: int = 0
    epoch: int = 0
    epoch_window: int = 0
    samples: int = 0
    tokens: float = 0
    skipped: int = 0
    nonfinite: int = 0

    def after(self, *, samples: int, tokens: float, applied: bool, finite: bool = True) -> Progress:
        """The progress one attempt later. A skipped attempt advances the data, and never ``step``."""
        return replace(
            self,
            step=self.step + applied,
            window=self.window + 1,
            epoch_window=self.epoch_window + 1,
            samples=self.samples + samples,
            tokens=self.tokens + tokens,
            skipped=self.skipped + (not applied),
            nonfinite=self.nonfinite + (not finite),
        )

    def next_epoch(self) -> Progress:
        """The progress at the start of the next epoch."""
        return replace(self, epoch=self.epoch + 1, epoch_window=0)
