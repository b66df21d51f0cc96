"""What the optimizers should be given, as another road than the engine's tells it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from distaccum.engines.modules import to_local

# Gradients of any kind as dense, real tensors that are wide enough to compare.


def wide(gradient: Tensor) -> Tensor:
    """Dense and real, in fp32 or fp64."""
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    dense = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
    return dense.to(widened(dense.dtype))


def widened(dtype: torch.dtype) -> torch.dtype:
    """The real number format that holds ``dtype``'s elements."""
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32


def square(tensor: Tensor) -> float:
    """The squared norm, in fp64; reads the device."""
    return float(tensor.double().square().sum())


def whole_numel(parameter: Any) -> int:
    """The elements of the whole parameter, wherever its memory is."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def piece_of(whole: Tensor, held: Tensor, start: int) -> Tensor:
    """The elements of a whole gradient that a rank's piece covers; the piece may end in padding."""
    length = to_local(held).numel() * (2 if held.is_complex() else 1)
    return whole.flatten()[start : start + length]


# The words of a proof: what a wrong factor is made of, and what every message ends with.


def closing(relation: str) -> str:
    """The end of a message: how a program trains that breaks a relation of ``config.checks.RELATIONS`` on purpose."""
    return (
        f"See docs/verification.md; trainer.verify_allow=[{relation}], or Accumulator(verify_allow=['{relation}']), "
        "trains so"
    )


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
        whole = square(true)
        clipped = whole if self.clip_value is None else square(true.double().clamp(-bound, bound))
        given = clipped if own.numel() == true.numel() else square(own.double().clamp(-bound, bound))
        self.whole += whole / self.unit**2
        self.clipped += clipped / self.unit**2
        self.own[name] = given / self.unit**2

    @property
    def norm(self) -> float:
        """Of the whole gradient, as a step should report it."""
        return math.sqrt(self.whole)

    def is_fault(self, factor: float) -> bool:
        """Whether a gradient that is off by ``factor`` is wrong, and not by design another than the loss's slope."""
        return self.faults is None or self.faults.contain(factor)
