"""Norm, clip and step: the boundary's arithmetic on gradients that are reduced already."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from distaccum.engines.base import StepResult

_CLIP_EPSILON = 1e-6  # torch.nn.utils.clip_grad_norm_'s own, so that clipped gradients equal its


def clip_and_step(
    optimizer: Optimizer, parameters: Sequence[nn.Parameter], clip_norm: float | None, *, divisor: float = 1.0
) -> StepResult:
    """Steps on the parameters' gradients over ``divisor``, scaled down to ``clip_norm`` (None: as they are).

    Reads nothing back. An optimizer whose fused kernel takes ``grad_scale`` and ``found_inf`` does it all in one pass
    over memory, and leaves weights and state untouched where the norm is not finite. Any other one is clipped first and
    then steps; there a non-finite gradient reaches the weights, and the caller must stop before it saves them.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = get_total_norm(gradients)
    if divisor != 1.0:
        norm = norm / divisor
    finite = torch.isfinite(norm).to(norm.dtype)
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        scale = None if clip_norm is None else ((norm + _CLIP_EPSILON) / clip_norm).clamp_(min=1.0)
        if divisor != 1.0:
            scale = torch.full_like(norm, divisor) if scale is None else scale * divisor
        # The kernels want fp32, whatever the gradients are.
        optimizer.grad_scale = None if scale is None else scale.float()  # type: ignore[attr-defined]
        optimizer.found_inf = 1.0 - finite.float()  # type: ignore[attr-defined]
        optimizer.step()
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
    else:
        if divisor != 1.0:
            torch._foreach_div_(gradients, divisor)
        if clip_norm is not None:
            clip_grads_with_norm_(parameters, clip_norm, norm)
        optimizer.step()
    return StepResult(grad_norm=norm, finite=finite)


def zero_in_place(parameters: Sequence[nn.Parameter]) -> None:
    """Zeroes gradients where they lie, so that those in DDP's buckets stay there: one operator for all."""
    torch._foreach_zero_([p.grad for p in parameters if p.grad is not None])
