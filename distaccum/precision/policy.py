"""Precision policies: immutable, chosen by name."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class PrecisionPolicy:
    """The number formats of one run. Parameters, gradients and reductions are fp32; the forward is autocast.

    Args:
        name: as in ``precision=NAME``.
        compute_dtype: what matrix products of the forward run in; losses are computed in fp32 always.
    """

    name: str
    compute_dtype: torch.dtype

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """The context for a forward pass on ``device``."""
        if self.compute_dtype is torch.float32:
            return nullcontext()
        return torch.autocast(device.type, dtype=self.compute_dtype)


POLICIES = {
    "fp32": PrecisionPolicy(name="fp32", compute_dtype=torch.float32),
    "bf16": PrecisionPolicy(name="bf16", compute_dtype=torch.bfloat16),
}
