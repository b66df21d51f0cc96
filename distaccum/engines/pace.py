"""Keeps ranks in step where a forward is a collective: missing micro-steps are run on an earlier input, for nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only

from distaccum.world import World

Call = tuple[tuple[Any, ...], dict[str, Any]]


class Pace:
    """Remembers what the model was last called with, and calls it so again where other ranks have a micro-step more.

    A rank that has nothing to remember, as it was never given a micro-batch, is given another rank's input.

    Args:
        model: whose forward is a collective.
        world: this rank.
    """

    def __init__(self, model: nn.Module, world: World) -> None:
        self._model, self._world = model, world
        self._remembered: Call | None = None
        self._everyone_remembers = self._owes = self._replays = False
        # The first of all hooks: others wait for ranks that wait for what is shared in it.
        model.register_forward_pre_hook(self._remember, with_kwargs=True, prepend=True)

    def _remember(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._replays or not torch.is_grad_enabled():
            return
        self._remembered = tree_map_only(Tensor, Tensor.detach, (args, kwargs))
        if self._owes:
            self._owes = False
            self._share(self._world.rank)

    def missing(self, micro_steps: int) -> int:
        """How many micro-steps another rank has more than this one's ``micro_steps``; a small host all-reduce."""
        size = self._world.size
        code, fewest = self._world.max_counts([micro_steps * size + size - 1 - self._world.rank, -micro_steps])
        most, source = code // size, size - 1 - code % size
        if most > -fewest and not self._everyone_remembers:
            if source == self._world.rank:
                self._owes = True  # it is shared as soon as there is something to share
            else:
                self._share(source)
        self._everyone_remembers = self._everyone_remembers or most > 0
        return most - micro_steps

    def _share(self, source: int) -> None:
        to_host = tree_map_only(Tensor, Tensor.cpu, self._remembered) if source == self._world.rank else None
        box: list[Any] = [to_host]
        dist.broadcast_object_list(box, src=source, device=torch.device("cpu"), group=self._world.host_group)
        if self._remembered is None:
            self._remembered = tree_map_only(Tensor, lambda tensor: tensor.to(self._world.device), box[0])

    def replay(self, autocast: Callable[[], Any]) -> None:
        """A forward and a backward whose gradient is zero."""
        assert self._remembered is not None, "no rank has a micro-batch"
        args, kwargs = self._remembered
        self._replays = True
        buffers = [(buffer, buffer.clone()) for buffer in self._model.buffers()]  # statistics: an input counts once
        try:
            with autocast():
                outputs, _ = tree_flatten(self._model(*args, **kwargs))
            grown = [output for output in outputs if isinstance(output, Tensor) and output.requires_grad]
            torch.autograd.backward(grown, [torch.zeros_like(output) for output in grown])
        finally:
            self._replays = False
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)
