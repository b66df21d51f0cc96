"""Whether a loop gives the model the samples of the micro-batch whose turn it is."""

from __future__ import annotations

import weakref
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from distaccum.data.batches import map_tensors
from distaccum.engines.base import Engine


class SamplesRun:
    """Notes which micro-batch's tensors the model is called with; what a loop has made of them itself is unknown.

    Args:
        engine: runs the forwards.
    """

    def __init__(self, engine: Engine) -> None:
        self._model = engine.unwrapped_model
        self._given: list[list[weakref.ref[Tensor]]] = []  # of each micro-batch so far
        self._called: set[int] = set()  # micro-batches, in the current micro-step
        self._hook: Any = None
        self.problem = ""
        """Of this rank, in words; empty where there is none."""

    def begins(self, batch: Any) -> None:
        """Called before a micro-step's forward in a loop of the user's."""
        tensors = list[weakref.ref[Tensor]]()
        map_tensors(batch, lambda tensor: tensors.append(weakref.ref(tensor)))
        self._given.append(tensors)
        self._called.clear()
        if not isinstance(self._model, torch.jit.ScriptModule):  # which has no hooks
            self._hook = self._model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, _: Any, args: Any, kwargs: Any) -> None:
        addresses = {address(leaf) for leaf in tree_flatten((args, kwargs))[0]} - {0}
        for number, tensors in enumerate(self._given):
            if any(address(one()) in addresses for one in tensors):
                self._called.add(number)

    def after_forward(self) -> None:
        """Called after its loss."""
        if self._hook is None:
            return
        self.forget()
        now = len(self._given) - 1
        if self._called and now not in self._called and not self.problem:
            earlier = min(self._called)
            self.problem = (
                f"micro-step {now} gives the model the samples of micro-batch {earlier}, and none of its own: use the "
                "batch that the loop over the window gives"
            )

    def forget(self) -> None:
        """Leaves the model alone, also where a forward has failed."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


def address(tensor: Any) -> int:
    """Where its memory begins; 0 of what has none of its own, as within torch.func's transforms."""
    if isinstance(tensor, Tensor) and tensor.layout is torch.strided:
        with suppress(RuntimeError):
            return tensor.data_ptr()
    return 0
