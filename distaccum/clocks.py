"""How far a run has come."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Clocks:
    """``step`` counts applied updates and ``window`` attempts; the position in the data is ``window`` alone.

    ``samples`` and ``tokens`` (what the loss counts) are those of all attempts, ``skipped`` the attempts not applied.
    """

    step: int = 0
    window: int = 0
    samples: int = 0
    tokens: int = 0
    skipped: int = 0

    def after(self, *, samples: int, tokens: int, applied: bool) -> Clocks:
        """The clocks one attempt later. A skipped attempt moves the data on, and never ``step``."""
        return replace(
            self,
            step=self.step + applied,
            window=self.window + 1,
            samples=self.samples + samples,
            tokens=self.tokens + tokens,
            skipped=self.skipped + (not applied),
        )
