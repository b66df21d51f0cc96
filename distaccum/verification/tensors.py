"""Gradients of any kind as dense, real tensors that are wide enough to compare."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from distaccum.engines.dtensor import to_local


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
