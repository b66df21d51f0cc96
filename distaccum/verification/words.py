"""The words of a proof: what a wrong factor is made of, and what every message ends with."""

from __future__ import annotations

import math
from collections.abc import Mapping

CLOSING = "See docs/verification.md; trainer.verify=never, or Accumulator(verify='never'), trains without this check"
NAMED = 4  # parameters in a message
_SHORT = (0.01, 1e4)  # factors that are written out
_ABOUT = 0.02


def words(factor: float, measures: Mapping[str, float], within: float = 5e-3) -> str:
    """A factor with what it is made of: ``8.00x = 2 ranks x 4 micro-batches``, to ``within``.

    Args:
        factor: what a gradient is multiplied by, and should not be.
        measures: numbers that it may be made of, with their names.
        within: how well it is known.
    """
    if factor == 0.0:
        return "zero"
    if not math.isfinite(factor):
        return "something, where there is no gradient"
    shown = f"{factor:.2f}x" if _SHORT[0] <= factor < _SHORT[1] else f"{factor:.3g}x"
    equals = "=" if within < _ABOUT else "~"
    kinds = [(name, value) for name, value in measures.items() if not math.isclose(value, 1.0, rel_tol=1e-3)]
    pairs = [(a, b) for i, a in enumerate(kinds) for b in kinds[i + 1 :]]
    for parts in [*((kind,) for kind in kinds), *pairs]:
        product = math.prod(value for _, value in parts)
        text = " x ".join(f"{value:g} {name}" for name, value in parts)
        if math.isclose(factor, product, rel_tol=within):
            return f"{shown} {equals} {text}"
        if math.isclose(factor, 1 / product, rel_tol=within):
            return f"{shown} {equals} 1 / ({text})"
    return shown


def first_line(error: BaseException) -> str:
    """Of an error's message, as much of it as fits a line."""
    return (str(error).splitlines() or [""])[0][:160]
