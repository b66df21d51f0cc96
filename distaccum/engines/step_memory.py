"""The memory that optimizers' first step takes and keeps: known before there is one.

Their rule steps a few small parameters; what it keeps and takes for an element of those, it does for each.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from distaccum.distributed.live_memory import LiveMemory
from distaccum.engines.dtensor import to_local
from distaccum.engines.rules import trial_copy

_SIDE = 64  # of a trial's parameters
_PARAMETERS = 2


def state_to_come(optimizers: Sequence[Optimizer]) -> int:
    """Bytes of state on this rank that the optimizers do not hold yet, and will after their first step.

    Of an optimizer whose rule cannot be tried, as much as Adam's.
    """
    total = 0.0
    for optimizer in optimizers:
        per_element: dict[torch.dtype, float] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if not parameter.requires_grad or parameter in optimizer.state:
                    continue
                kind = parameter.dtype
                if kind not in per_element:
                    per_element[kind] = _bytes_per_element(optimizer, kind)
                total += per_element[kind] * to_local(parameter).numel()
    return round(total)


def _bytes_per_element(optimizer: Optimizer, dtype: torch.dtype) -> float:
    values = [nn.Parameter(torch.zeros(_SIDE, _SIDE, dtype=dtype)) for _ in range(_PARAMETERS)]
    settings = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    trial = trial_copy(optimizer, [{**settings, "params": values, "fused": None, "foreach": False}])
    elements = _PARAMETERS * _SIDE**2
    try:
        assert trial is not None
        for value in values:
            value.grad = torch.zeros_like(value)
        before = LiveMemory("cpu")
        with before, torch.random.fork_rng(devices=[]):
            trial.step()
        kept = before.now
    except Exception:  # each optimizer has its own
        return 2.0 * dtype.itemsize
    return kept / elements
