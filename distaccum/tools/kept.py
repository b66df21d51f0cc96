"""Whether a loop's loss reads what an earlier micro-batch's has left, outside of the model.

A centre, a queue, a running mean of losses: whatever holds it, an attribute or a variable, its tensor was computed of
one micro-batch's samples, or written in place, and the loss of a later one is computed of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn, strided
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

_OF_SHAPES = r"aten::(\w+_like|new_\w+|sym_\w+|size|stride|is_\w+)"  # read no number of a tensor
_SETS = r"aten::(copy_|fill_|zero_)"  # what was there does not matter


class _Memory:
    """Of tensors; it is not kept."""

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        self._known: dict[int, StorageWeakRef] = {}
        self.add(tensors)

    def add(self, tensors: Iterable[Tensor]) -> None:
        for one in tensors:
            storage = one.untyped_storage()
            self._known[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]

    def remove(self, tensors: Iterable[Tensor]) -> None:
        for one in tensors:
            self._known.pop(one.untyped_storage()._cdata, None)

    def holds(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._known


class Kept:
    """Of a window's micro-batches in their order, what is computed of their samples and outlives them.

    Args:
        model: whose own memory is looked at elsewhere.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before, self._now = _Memory(), _Memory()  # computed of samples, or written, by the last micro-batch
        self._own, self._follows = _Memory(), _Memory()  # of this micro-batch; computed of what the last one has left
        self.read = False
        """Whether a loss is computed of what an earlier micro-batch has left."""

    def begins(self, batch: Iterable[Tensor]) -> None:
        """Called with a micro-batch's tensors, before its first operator."""
        self._now, self._follows = _Memory(), _Memory()
        self._own = _Memory(_plain([*self._model.parameters(), *self._model.buffers()]))
        self.given(batch)

    def given(self, tensors: Iterable[Tensor]) -> None:
        """Called with what the model is given, and what it returns."""
        plain = _plain(tensors)
        self._now.add(plain)
        self._own.add(plain)

    def note(self, function: Any, given: Any, found: Any) -> None:
        """Called after an operator."""
        reads, gives, name = _plain(tree_leaves(given)), _plain(tree_leaves(found)), function._schema.name
        written = [one for one in gives if any(one is two for two in reads)]
        sets = bool(written) and re.fullmatch(_SETS, name) is not None
        if sets:
            reads = [one for one in reads if all(one is not two for two in written)]
            whole = [one for one in written if one.nbytes == one.untyped_storage().nbytes()]
            for memory in (self._before, self._now, self._follows):
                memory.remove(whole)
        if re.fullmatch(_OF_SHAPES, name):
            reads = []
        if any(self._follows.holds(one) or (self._before.holds(one) and not self._own.holds(one)) for one in reads):
            self._follows.add(gives)
        if any(map(self._now.holds, reads)) or (written and not sets):
            self._now.add(gives)
        shared = _Memory([*reads, *written])
        self._own.add(one for one in gives if not shared.holds(one))

    def ends(self, losses: Iterable[Tensor]) -> None:
        """Called with the micro-batch's losses."""
        self.read = self.read or any(map(self._follows.holds, _plain(losses)))
        self._before = self._now


def _plain(values: Iterable[Any]) -> list[Tensor]:
    """The tensors that have memory of their own."""
    return [one for one in values if type(one) in (Tensor, nn.Parameter) and one.layout is strided]
