"""The memory of the tensors that operators make, counted while they are alive."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

BLOCK = {"cuda": 512}  # bytes, of which a GPU's allocator gives whole ones


class LiveMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not annotate it
    """Counts the bytes of tensors on one kind of device that operators make within the block, while they are alive.

    Args:
        kind: of the device.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._kind, self._block = kind, BLOCK.get(kind, 1)
        self._known: dict[int, weakref.ref[Any]] = {}  # by a storage's address

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operator, then looks at what it gives; what it is given and nobody made was there before."""
        self._note((args, kwargs), made=False)
        found = function(*args, **(kwargs or {}))
        self._note(found, made=True)
        return found

    def _note(self, values: Any, *, made: bool) -> None:
        for tensor in tree_leaves(values):
            if isinstance(tensor, Tensor) and tensor.device.type == self._kind:
                storage = tensor.untyped_storage()
                if storage._cdata not in self._known:
                    self._add(storage, -(-storage.nbytes() // self._block) * self._block if made else 0)

    def _add(self, storage: torch.UntypedStorage, size: int) -> None:
        address = storage._cdata

        def freed(_: object) -> None:
            del self._known[address]
            self.now -= size

        self._known[address] = weakref.ref(storage, freed)
        self.now += size
        self.peak = max(self.peak, self.now)
