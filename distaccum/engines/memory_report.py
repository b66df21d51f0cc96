"""Where a rank's memory is, in words."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from distaccum.config.checks import size_of
from distaccum.engines.base import Engine
from distaccum.engines.modules import to_local


def memory_by_part(engine: Engine) -> str:
    """Weights, gradients and optimizer state of this rank, and what its device holds in all."""
    parameters = list(engine.unwrapped_model.parameters())
    states = [entry for optimizer in engine.optimizers for entry in optimizer.state.values()]
    sizes = {
        "weights": _bytes(parameters),
        "gradients": _bytes(p.grad for p in parameters),
        "optimizer state": sum(_bytes(entry.values()) for entry in states),
    }
    said = ", ".join(f"{name} {size_of(size)}" for name, size in sizes.items())
    if engine.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(engine.device)
        said += f"; {size_of(total - free)} of the card's {size_of(total)} are taken"
    return f"This rank holds: {said}"


def _bytes(values: Iterable[object]) -> int:
    return sum([to_local(value).nbytes for value in values if isinstance(value, Tensor)])
