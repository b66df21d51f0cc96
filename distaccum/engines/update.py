"""Norm, clip and step: the boundary's arithmetic on gradients that are reduced already."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from distaccum.engines.base import StepResult

_CLIP_EPSILON = 1e-6  # torch.nn.utils.clip_grad_norm_'s own, so that clipped gradients equal its


def clip_and_step(optimizer: Optimizer, parameters: Sequence[nn.Parameter], clip_norm: float | None) -> StepResult:
    """Steps on the parameters' gradients, scaled down to ``clip_norm`` (None: as they are). Reads nothing back.

    An optimizer whose fused kernel takes ``grad_scale`` and ``found_inf`` does it all in one pass over memory, and
    leaves weights and state untouched where the norm is not finite. Any other one is clipped first and then steps;
    there a non-finite gradient reaches the weights, and the caller must stop before it saves them.
    """
    norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
    finite = torch.isfinite(norm).to(norm.dtype)
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        ratio = None if clip_norm is None else ((norm + _CLIP_EPSILON) / clip_norm).clamp_(min=1.0)
        # The kernels want fp32, whatever the gradients are.
        optimizer.grad_scale = None if ratio is None else ratio.float()  # type: ignore[attr-defined]
        optimizer.found_inf = 1.0 - finite.float()  # type: ignore[attr-defined]
        optimizer.step()
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
    else:
        if clip_norm is not None:
            clip_grads_with_norm_(parameters, clip_norm, norm)
        optimizer.step()
    return StepResult(grad_norm=norm, finite=finite)
