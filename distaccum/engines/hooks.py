"""What looks at windows attaches to the engine, which calls it: the engine names none of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


class WindowHook:
    """Looks at windows. Every method does nothing here; every rank has the same hooks in the same order."""

    def before_step(self, divisor: float) -> None:
        """The gradient is reduced, and no weight has moved: may be a collective, and what it raises all ranks raise.

        Args:
            divisor: the gradient is what was accumulated over it.
        """


@dataclass(frozen=True)
class BeforeStep(WindowHook):
    """Calls a function before each step, as to set the learning rate."""

    call: Callable[[float], object]

    def before_step(self, divisor: float) -> None:
        """See :class:`WindowHook`."""
        self.call(divisor)
