"""Counts that do not vary between machines: operators, collectives and their bytes, device reads."""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class OperationCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not annotate it
    """Counts the operators that this thread dispatches within the ``with`` block, CPU backward passes included.

    ``counts`` has ``aten ops``; ``device reads`` (``item``); ``gradient reductions`` and ``gradient bytes`` (those of
    1-D floating tensors, as buckets are); ``other reductions`` and ``other bytes`` (such as a window's count); and
    ``other collectives``. Kinds that did not occur are 0.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Counts the operator, then runs it."""
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


class CollectiveCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not annotate it
    """Counts the collectives that this thread calls within the ``with`` block, by kind.

    ``calls`` and ``payload`` (bytes of the whole tensor: the input of a reduction, the output of a gather) are by kind:
    ``all-reduce``, ``reduce``, ``reduce-scatter``, ``all-gather``, ``all-to-all``, ``broadcast``. Those below ``SMALL``
    bytes are ``control``: counts, norms and decisions. Any other collective is counted under its own name.
    """

    SMALL = 4096
    # by name: the kind, and the index of the argument that holds the whole tensor
    _KINDS: ClassVar = {
        "allreduce_": ("all-reduce", 0),
        "allreduce_coalesced_": ("all-reduce", 0),
        "reduce_": ("reduce", 0),
        "_reduce_scatter_base_": ("reduce-scatter", 1),
        "reduce_scatter_": ("reduce-scatter", 1),
        "reduce_scatter_tensor_coalesced_": ("reduce-scatter", 1),
        "_allgather_base_": ("all-gather", 0),
        "allgather_": ("all-gather", 0),
        "allgather_into_tensor_coalesced_": ("all-gather", 0),
        "alltoall_base_": ("all-to-all", 1),
        "broadcast_": ("broadcast", 0),
    }

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()
        self.payload: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Counts the operator, then runs it."""
        namespace, name, *_ = str(function).split(".")
        if namespace in ("c10d", "_c10d_functional") and name != "wait_tensor":
            kind, whole = self._KINDS.get(name, (name, 0)) if namespace == "c10d" else (name, 0)
            tensors = [part for part in tree_leaves(args[whole]) if isinstance(part, Tensor)] if args else []
            payload = sum(tensor.nbytes for tensor in tensors)
            kind = "control" if kind != name and payload < self.SMALL else kind
            self.calls[kind] += 1
            self.payload[kind] += payload
        return function(*args, **(kwargs or {}))
