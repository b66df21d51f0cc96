"""What the optimizers should be given, as another road than the engine's tells it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import Tensor

from distaccum.verification.tensors import square

OF_NORM = 1e-5  # what a clip's epsilon and a divisor in fp32 do to a norm
ONE_FACTOR = 0.01  # of a factor, from rank to rank


@dataclass(frozen=True)
class WholeFactors:
    """Whole numbers that a window is made of: no loss gives its gradient such a factor by design.

    ``within``: of a factor, how well it is known.
    """

    numbers: frozenset[int]
    within: float

    def contain(self, factor: float) -> bool:
        """Whether ``factor``, or one over it, is one of them; also where it is none at all."""
        if not factor > 0.0:
            return True
        larger = max(factor, 1.0 / factor)
        return any(abs(larger - whole) <= self.within * whole for whole in self.numbers)


@dataclass(kw_only=True)
class Expected:
    """Squared norms of the window's gradient, unscaled and clipped by value, in fp64.

    Args:
        road: by which they are known, in words.
        unit: what the gradients given to :meth:`add` are still multiplied by.
        clip_value: what the engine was told.
        tolerance: of a norm.
        faults: the factors that are faults; None: each is one.
        reversed: whether the engine's gradient is the opposite of what the road tells.
    """

    road: str
    unit: float = 1.0
    clip_value: float | None = None
    tolerance: float = OF_NORM
    faults: WholeFactors | None = None
    reversed: bool = False
    allowed: float = 0.0
    """The norm of a difference that rounding explains."""
    whole: float = 0.0
    """Over all ranks and parameters, before clipping by value."""
    clipped: float = 0.0
    """The same after it."""
    own: dict[str, float] = field(default_factory=dict)
    """By parameter: of what this rank's optimizers should be given."""

    def add(self, name: str, true: Tensor, own: Tensor) -> None:
        """Adds a parameter's gradient, and the elements of it that this rank's optimizers should be given."""
        bound = math.inf if self.clip_value is None else abs(self.clip_value * self.unit)
        self.whole += square(true) / self.unit**2
        self.clipped += square(true.double().clamp(-bound, bound)) / self.unit**2
        self.own[name] = square(own.double().clamp(-bound, bound)) / self.unit**2

    @property
    def norm(self) -> float:
        """Of the whole gradient, as a step should report it."""
        return math.sqrt(self.whole)

    def is_fault(self, factor: float) -> bool:
        """Whether a gradient that is off by ``factor`` is wrong, and not by design another than the loss's slope."""
        return self.faults is None or self.faults.contain(factor)
