"""Gradients that FSDP2 has accumulated whole and not reduced yet: torch has no public name for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule


def drop(model: nn.Module) -> None:
    """Drops what an unfinished window has accumulated."""
    for group in _groups(model):
        group._partial_reduce_output = None
    for parameter in parameters_of(model):
        parameter.unsharded_accumulated_grad = None
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.grad = None


def parameters_of(model: nn.Module) -> Iterator[Any]:
    """FSDP2's own objects, one a parameter."""
    for group in _groups(model):
        yield from group.fsdp_params


def accumulated(parameter: Any) -> Tensor | None:
    """The gradient that one of :func:`parameters_of` holds; None where it has none."""
    whole: Tensor | None = parameter.unsharded_accumulated_grad
    return whole if whole is not None else getattr(getattr(parameter, "_unsharded_param", None), "grad", None)


def _groups(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        state: Any = module._get_fsdp_state() if isinstance(module, FSDPModule) else None
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        yield from filter(None, groups)
