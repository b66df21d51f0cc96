"""Uneven inputs where a forward is a collective: ranks with fewer micro-batches replay an earlier input.

The gradient of a replay is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only

from distaccum.distributed.world import World
from distaccum.errors import MisuseError

_NOTHING, _INPUT, _ALL = range(3)  # what a rank knows about a micro-step


@dataclass
class _Call:
    """One call of the model: its arguments, and the outputs that the backward reached, by number (None: unknown)."""

    args: Any
    kwargs: Any
    reached: set[int] | None = field(default_factory=set)


class UnevenInputs:
    """Remembers how a micro-step called the model, and replays it where other ranks have one micro-step more.

    A rank that never had a micro-batch gets the call from another rank; in the very first window it gets the arguments
    only, not which of the outputs the loss used.

    Args:
        model: whose forward is a collective.
        world: this rank.
    """

    def __init__(self, model: nn.Module, world: World) -> None:
        self._model = model
        self._world = world
        self._call: _Call | None = None
        self._forwards = 0  # in the current micro-step
        self._must_share = False
        self._begins = False
        self.replays = False
        # The first of all hooks: others wait for ranks that wait for what this one shares.
        model.register_forward_pre_hook(self._remember, with_kwargs=True, prepend=True)
        model.register_forward_hook(self._watch)

    def begin_micro_step(self) -> None:
        """Called before a micro-step's first forward, if it has one."""
        self._begins = True

    def _remember(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.replays or not torch.is_grad_enabled():
            return
        self._forwards = 1 if self._begins else self._forwards + 1
        self._begins = False
        self._call = _Call(*tree_map_only(Tensor, Tensor.detach, (args, kwargs)))
        if self._must_share:
            self._must_share = False
            self._share(self._world.rank, known=False)

    def _watch(self, _: nn.Module, __: Any, output: Any) -> None:
        if self.replays or not torch.is_grad_enabled() or self._call is None:
            return
        for i, tensor in _grown(output):
            tensor.register_hook(partial(_reach, self._call, i))  # type: ignore[no-untyped-call]

    def missing_steps(self, micro_steps: int) -> int:
        """How many micro-steps this rank has to replay, given its own ``micro_steps``; a small host all-reduce.

        Raises:
            MisuseError: some rank has to replay, and the loss calls the model several times in a micro-batch.
        """
        size, rank, knows = self._world.size, self._world.rank, self._knows()
        code = micro_steps * size + size - 1 - rank
        code, fewest, least, forwards = self._world.all_reduce_max_host([code, -micro_steps, -knows, self._forwards])
        most, source = code // size, size - 1 - code % size
        if most > -fewest and forwards > 1:
            problem = f"the loss calls the model {forwards} times in a micro-batch, and ranks have different numbers"
            raise MisuseError(f"{problem} of them: on this engine join the calls into one, or use another engine")
        if most > -fewest and -least < _ALL:
            known = self._world.all_reduce_max_host([knows if rank == source else 0])[0] == _ALL
            if rank == source and not known:
                self._must_share = True  # in its next forward, when there is something to share
            else:
                self._share(source, known=known)
        return most - micro_steps

    def _knows(self) -> int:
        if self._call is None:
            return _NOTHING
        return _INPUT if self._call.reached is None else _ALL

    def _share(self, source: int, *, known: bool) -> None:
        box: list[Any] = [None]
        if source == self._world.rank:
            assert self._call is not None
            own = (self._call.args, self._call.kwargs, self._call.reached if known else None)
            box = [tree_map_only(Tensor, Tensor.cpu, own)]
        dist.broadcast_object_list(box, src=source, device=torch.device("cpu"), group=self._world.host_group)
        if self._knows() != _ALL:
            self._call = _Call(*tree_map_only(Tensor, lambda tensor: tensor.to(self._world.device), box[0]))

    def replay(self, autocast: Callable[[], Any]) -> None:
        """Runs a forward and a backward whose gradient is zero; random generators and buffers stay as they were."""
        assert self._call is not None, "no rank has a micro-batch"
        self.replays = True
        buffers = [(buffer, buffer.clone()) for buffer in self._model.buffers()]  # statistics: an input counts once
        devices = [self._world.device] if self._world.device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices=devices):
                used = self._outputs(self._call, autocast)
                torch.autograd.backward(used, [torch.zeros_like(output) for output in used])
        finally:
            self.replays = False
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)

    def _outputs(self, call: _Call, autocast: Callable[[], Any]) -> list[Tensor]:
        with autocast():
            output = self._model(*call.args, **call.kwargs)
        return [tensor for i, tensor in _grown(output) if not call.reached or i in call.reached]


def _reach(call: _Call, i: int, _: Tensor) -> None:
    if call.reached is not None:
        call.reached.add(i)


def _grown(output: Any) -> Iterator[tuple[int, Tensor]]:
    """The tensors of an output that a backward can reach, numbered."""
    for i, leaf in enumerate(_leaves(output)):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            yield i, leaf


def _leaves(value: Any) -> Iterator[Any]:
    for leaf in tree_flatten(value)[0]:
        if is_dataclass(leaf) and not isinstance(leaf, type):
            for item in fields(leaf):
                yield from _leaves(getattr(leaf, item.name, None))
        else:
            yield leaf
