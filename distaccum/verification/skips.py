"""What a window without a step leaves: the clocks where they were, and a loss scale that can still be used."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from distaccum.engines.base import Engine
from distaccum.errors import VerificationError


class SkippedWindows:
    """Looks at the window before, where that was to be verified and its gradient was not finite.

    Args:
        engine: has the loss scale.
        steps: the updates that the run has counted so far.
    """

    def __init__(self, engine: Engine, steps: Callable[[], int]) -> None:
        self._engine, self._steps = engine, steps
        self._before: int | None = None  # updates, before a window that made none

    def note(self, reported: Tensor, steps_before: int) -> None:
        """Called after a window's step, with the norm that it reports."""
        self._before = None if math.isfinite(float(reported)) else steps_before

    def check(self) -> None:
        """Called before the next window.

        Raises:
            VerificationError: a skipped window counts as an update, or the loss scale is below its floor.
        """
        before, self._before = self._before, None
        if before is not None and (now := self._steps()) != before:
            raise VerificationError(
                "the gradient of the window before was not finite, so no weight has moved, and the run counts it as an "
                f"update: step went from {before} to {now}, and the learning rate follows it"
            )
        scale, floor = self._engine.loss_scale, self._engine.min_loss_scale
        if scale is not None and floor is not None and not float(scale) >= floor:
            raise VerificationError(
                f"the loss scale has fallen to {float(scale):g}, below its floor of {floor:g}: gradients underflow, "
                "and at 0 they are NaN without being found so"
            )
