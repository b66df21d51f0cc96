"""Counting what does not vary between machines: operators, collectives and their bytes, device reads."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not annotate it
    """Counts what this thread dispatches within the ``with`` block, backward passes on the CPU included.

    ``counts`` has ``aten ops``; ``device reads`` (``item``); ``gradient reductions`` and ``gradient bytes`` (those of
    buckets: 1-D floating tensors); ``other reductions`` and ``other bytes`` (a window's count); ``other collectives``.
    What never happened counts 0.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Counts, then runs the operator."""
        name = str(function)
        if name.startswith("c10d.allreduce_"):
            tensor: Tensor = args[0][0]
            kind = "gradient" if tensor.is_floating_point() and tensor.ndim == 1 else "other"
            self.counts[f"{kind} reductions"] += 1
            self.counts[f"{kind} bytes"] += tensor.nbytes
        elif name.startswith("c10d."):
            self.counts["other collectives"] += 1
        elif name.startswith("aten."):
            self.counts["aten ops"] += 1
            self.counts["device reads"] += name.startswith("aten._local_scalar_dense")
        return function(*args, **(kwargs or {}))
