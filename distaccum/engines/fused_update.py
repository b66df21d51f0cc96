"""The arithmetic of a step on reduced gradients: norm, decision, unscaling, clipping, step, loss scale.

By hand that is six walks over gradient memory: unscale (read, write), norm (read), clip (read, write), step (read).
Here the norm is read once, and is the overflow check too; an optimizer with a fused kernel then takes the decision as
``found_inf``, and the loss scale, the count and the clip coefficient in one number, its ``grad_scale``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from distaccum.engines.base import StepOutput
from distaccum.engines.dtensor import to_local
from distaccum.engines.host_copy import HostCopy
from distaccum.engines.rules import foreign_hooks
from distaccum.errors import MisuseError
from distaccum.precision.loss_scale import LossScale

_CLIP_EPSILON = 1e-6  # torch.nn.utils.clip_grad_norm_'s own, so that clipped gradients equal its
_LARGE = 2**17  # elements


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """What is done to a reduced gradient on its way into the weights.

    Args:
        clip_norm: largest norm of the global gradient; None: no clipping by norm.
        clip_value: largest absolute value of its elements; None: no clipping by value.
        scaler: of the loss, where gradients pass through fp16.
        underflow_every: with a scaler, attempts between two samples of the fraction that fp16 flushed to zero; 0: none.
    """

    clip_norm: float | None = None
    clip_value: float | None = None
    scaler: LossScale | None = None
    underflow_every: int = 0


class FusedUpdate:
    """One step of all optimizers, or of none: none moves where any gradient is NaN or infinite.

    Args:
        optimizers: over disjoint sets of the parameters.
        parameters: those whose gradients make up the global one, by name.
        options: clipping and the loss scale.
        all_reduce_shards: sums a tensor in place over the ranks that hold the gradient's shards; None where the
            gradient is whole.
        reduced: what else has reduced gradients: weights, where ``parameters`` are their masters.
        whole_norms: of parameters whose gradients are sharded: the norm of each whole gradient on one rank, and 0 on
            the others; a collective. None: each rank takes the norm of its shard.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        parameters: Mapping[str, nn.Parameter],
        options: StepOptions,
        *,
        all_reduce_shards: Callable[[Tensor], Tensor] | None = None,
        reduced: Sequence[nn.Parameter] = (),
        whole_norms: Callable[[Sequence[nn.Parameter]], Tensor] | None = None,
    ) -> None:
        self._whole_norms = whole_norms
        self._optimizers = optimizers
        self._parameters = parameters
        self._options = options
        self._all_reduce_shards = all_reduce_shards
        self._known = frozenset(map(id, (*parameters.values(), *reduced)))
        self._begun: set[int] = set()  # the parameters that have optimizer state

    def forget(self) -> None:
        """Called after the optimizers' state was replaced: which parameters have one is unknown again."""
        self._begun.clear()

    def expect_known(self) -> set[int]:
        """The ``id`` of each parameter with a gradient that the optimizers hold.

        Raises:
            MisuseError: one of them is none of the parameters.
        """
        groups = [group["params"] for optimizer in self._optimizers for group in optimizer.param_groups]
        held = {id(p) for parameters in groups for p in parameters if p.grad is not None}
        if not held <= self._known:
            raise MisuseError("a parameter was unfrozen after wrapping, and is not reduced: unfreeze it before")
        return held

    def step(self, divisor: float = 1.0, norm_bound: float = math.inf) -> StepOutput:
        """Steps on the gradients over ``divisor`` and the loss scale, clipped; then moves the loss scale.

        No optimizer steps where the norm is not below ``norm_bound``.

        A fused step reads nothing back, except a parameter's first: with ``found_inf`` set, a kernel would
        leave the momentum uninitialised. The host has to leave out an unfused step.

        Raises:
            MisuseError: an optimizer holds a gradient that is none of the parameters'.
        """
        held = self.expect_known()
        with_gradient = {name: p for name, p in self._parameters.items() if p.grad is not None}
        found = [p.grad for p in with_gradient.values() if p.grad is not None]
        if self._all_reduce_shards is not None:
            found = [to_local(gradient) for gradient in found]
        gradients = [torch.view_as_real(g) if g.is_complex() else g for g in found]
        norms = norms_of(gradients) if self._whole_norms is None else self._whole_norms(list(with_gradient.values()))
        if self._all_reduce_shards is not None:  # in fp64: squares leave fp32's range where the norms do not
            norms = self._all_reduce_shards(norms.double().square()).sqrt().to(norms.dtype)
            held = self.expect_known()  # without what no rank has used, whose zeros are gone
        norm = torch.linalg.vector_norm(norms) if gradients else norms.sum()
        scaler = self._options.scaler
        scale: float | Tensor | None = scaler.current * divisor if scaler else None if divisor == 1.0 else divisor
        norm = norm if scale is None else norm / scale
        applied = finite = (norm < math.inf).to(norm.dtype)  # NaN is not less
        if norm_bound < math.inf:
            applied = (norm < norm_bound).to(norm.dtype)
        self._apply(held, self._clipped(gradients, norm, scale), applied)
        loss_scale = scaler.current.to(applied.dtype) if scaler else torch.ones_like(applied)
        decision = HostCopy(torch.stack((applied, loss_scale, norm)))
        if scaler:
            scaler.advance(1.0 - finite)
        return StepOutput(
            grad_norm=norm,
            decision=decision,
            names=list(with_gradient),
            norms=norms,
            norms_scale=1.0 if scale is None else scale,
        )

    def _apply(self, held: set[int], remaining: Tensor | None, applied: Tensor) -> None:
        """Has the optimizers step on the gradients of ``held`` over ``remaining``, where ``applied`` is 1.0."""
        begun = held <= self._begun
        fused = [getattr(optimizer, "_step_supports_amp_scaling", False) for optimizer in self._optimizers]
        if not ((begun and all(fused)) or HostCopy(applied).read() == 1.0):
            return
        for optimizer, folds in zip(self._optimizers, fused, strict=True):
            if folds and applied.dtype == torch.float32 and not foreign_hooks(optimizer):
                _step_fused(optimizer, remaining, 1.0 - applied)
            elif folds:  # the kernels read the divisor as fp32: fp64 gradients would lose digits; hooks see gradients
                _divide(_gradients_of(optimizer), remaining)
                _step_fused(optimizer, None, 1.0 - applied)
            else:
                _divide(_gradients_of(optimizer), remaining)
                optimizer.step()
        if not begun:
            self._begun |= held

    def _clipped(self, gradients: list[Tensor], norm: Tensor, scale: float | Tensor | None) -> Tensor | None:
        """The remaining divisor of the gradients; None: 1. Clipping by value is done here, in place."""
        if self._options.clip_value is not None:
            bound = torch.zeros_like(norm) + self._options.clip_value * (1.0 if scale is None else scale)
            for gradient in gradients:
                gradient.clamp_(-bound.to(gradient.dtype), bound.to(gradient.dtype))
        if self._options.clip_norm is None:
            return None if scale is None else torch.ones_like(norm) * scale
        excess = ((norm + _CLIP_EPSILON) / self._options.clip_norm).clamp_(min=1.0)
        return excess if scale is None else excess * scale


def norms_of(gradients: Sequence[Tensor]) -> Tensor:
    """The 2-norm of each, in fp64 where any of them is, else in fp32: one read of each."""
    wide = torch.float64 if torch.float64 in {gradient.dtype for gradient in gradients} else torch.float32
    if not gradients:
        return torch.zeros(0, dtype=wide)
    # On the CPU torch adds up all squares of a tensor in one go, in one thread: of 50,000 x 1,024 that is off by 4e-3,
    # and takes twice as long as row by row.
    parts = [
        _row_norms(g, wide) if g.numel() > _LARGE and g.is_cpu and g.ndim > 1 and g.is_contiguous() else g
        for g in gradients
    ]
    return torch.stack(torch._foreach_norm(parts, 2, wide))


def _row_norms(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(gradient, dim=tuple(range(1, gradient.ndim)), dtype=dtype)
    return norms


def _step_fused(optimizer: Any, divisor: Tensor | None, found_inf: Tensor) -> None:
    optimizer.grad_scale = None if divisor is None else divisor.float()
    optimizer.found_inf = found_inf.float()
    try:
        optimizer.step()
    finally:
        del optimizer.grad_scale, optimizer.found_inf


def _divide(gradients: list[Tensor], divisor: Tensor | None) -> None:
    """In place, in one walk over them."""
    if divisor is not None and gradients:
        torch._foreach_div_(gradients, divisor)


def _gradients_of(optimizer: Optimizer) -> list[Tensor]:
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    return [to_local(p.grad) for p in parameters if p.grad is not None]


def zero_in_place(parameters: Sequence[nn.Parameter]) -> None:
    """Zeroes gradients where they lie, so that those in DDP's buckets stay there: one operator for all."""
    torch._foreach_zero_([p.grad for p in parameters if p.grad is not None])


def underflow_fraction(
    gradients: Sequence[Tensor], all_reduce_shards: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """The fraction of elements that are 0.0, but for rows that are 0.0 as a whole: 0-dim; one read of each gradient.

    In gradients that came through fp16 these are the elements too small for it at the window's loss scale, since others
    are hardly ever exactly 0. Whole rows are: those of an embedding whose token did not occur.
    ``all_reduce_shards`` as :class:`FusedUpdate` takes it.
    """
    zeros = looked_at = torch.zeros((), dtype=torch.float64, device=gradients[0].device)
    for gradient in gradients:
        rows = gradient.flatten(1) if gradient.ndim > 1 else gradient.reshape(1, -1)
        nonzero = torch.count_nonzero(rows, dim=1)
        elements = (nonzero > 0).sum() * rows.shape[1]
        looked_at = looked_at + elements
        zeros = zeros + elements - nonzero.sum()
    both = torch.stack((zeros, looked_at))
    zeros, looked_at = both if all_reduce_shards is None else all_reduce_shards(both)
    fraction: Tensor = zeros / looked_at.clamp(min=1)
    return fraction
