"""ZeRO stage 1 on DDP: each parameter's optimizer state lives on one rank, which steps it and broadcasts the result.

Source: S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), with
parameters assigned whole, as torch's ``ZeroRedundancyOptimizer`` does it. That class makes the optimizer itself, hides
its fused kernel, and joins state through pickles. Here the optimizer is the user's, of any kind: a rule that computes
with whole matrices stays right.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from distaccum.distributed.world import World
from distaccum.engines.base import StateLayout
from distaccum.engines.ddp.stepper import WholeStepper
from distaccum.engines.group_settings import WholeGroups
from distaccum.engines.modules import owners_by_size, put_back
from distaccum.engines.optimizer_step import OptimizerStep
from distaccum.engines.rules import check_hooks, check_parts, expect_no_hooks
from distaccum.errors import DistaccumError

_log = logging.getLogger(__name__)
_ALIGNMENT = 64  # bytes, torch's own on the CPU


class ZeRO1(WholeStepper):
    """Each parameter is stepped by one rank. Those of one rank lie in one flat buffer, and travel as one.

    Args:
        world: this rank.
    """

    layout = StateLayout.SHARDED
    steps_parts = True
    place = "on one rank each"
    """Where a parameter's optimizer state lies, for people."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._flat_buffers: list[tuple[int, Tensor]] = []  # by the rank that steps them
        self._whole: list[tuple[list[list[nn.Parameter]], dict[int, int]]] = []  # each optimizer's groups, and owners
        self._places: list[tuple[nn.Parameter, Tensor]] = []  # in the flat buffers
        self._addresses: list[int] = []

    def _prepare(self, optimizers: Sequence[Optimizer], world: World) -> None:
        for optimizer in optimizers:
            check_hooks(optimizer)
            check_parts(optimizer, "zero1", warn=world.is_main)
        self._groups = WholeGroups(optimizers)

    def _partition(self, optimizers: Sequence[Optimizer]) -> None:
        self.partition(optimizers)
        super()._partition(optimizers)
        self._groups.show(copies=self.weights.rounded)

    @property
    def groups(self) -> AbstractContextManager[object]:
        """See :class:`WholeStepper`."""
        return self._groups

    def describe(self, spread: str) -> str:
        """See :class:`WholeStepper`."""
        return f"; {self.weights.held} {self.place}, {spread} of parameters broadcast per step"

    def before_step(self, optimizers: Sequence[Optimizer], step: OptimizerStep) -> None:
        """See :class:`WholeStepper`."""
        self._groups.check()
        expect_no_hooks(optimizers)
        step.expect_known()  # here every rank sees what any would
        super().before_step(optimizers, step)
        self.take_in()

    def after_step(self) -> None:
        """See :class:`WholeStepper`."""
        super().after_step()
        self.broadcast()

    def give_back(self, optimizers: Sequence[Optimizer]) -> None:
        """See :class:`WholeStepper`."""
        self._groups.release()
        self.weights.release(optimizers)
        self.restore(optimizers)
        self.weights.restore()

    # --- which rank steps what

    def partition(self, optimizers: Sequence[Optimizer]) -> None:
        """Leaves each optimizer the parameters that this rank steps; every rank computes the same partition.

        Each optimizer's are partitioned separately, as one kind may keep more per element than another.
        """
        for optimizer in optimizers:
            held = [p for group in optimizer.param_groups for p in group["params"]]
            owners = dict(zip(map(id, held), owners_by_size([p.numel() for p in held], self._world.size), strict=True))
            self._whole.append(([list(group["params"]) for group in optimizer.param_groups], owners))
            for group in optimizer.param_groups:
                group["params"] = [p for p in group["params"] if owners[id(p)] == self._world.rank]
            for parameter in held:
                if owners[id(parameter)] != self._world.rank:
                    optimizer.state.pop(parameter, None)
            for rank in range(self._world.size):
                self._lay_out([p for p in held if owners[id(p)] == rank and p.requires_grad], rank)

    def _lay_out(self, parameters: Sequence[nn.Parameter], rank: int) -> None:
        for dtype in sorted({p.dtype for p in parameters}, key=str):
            same = [p for p in parameters if p.dtype is dtype]
            # Each begins where torch would have put it by itself: the bits that a kernel gives depend on that.
            starts = [0, *accumulate(_aligned(p) for p in same)]
            buffer = torch.zeros(starts.pop(), dtype=dtype, device=same[0].device)
            for parameter, start in zip(same, starts, strict=True):
                dense = parameter.is_contiguous() or parameter.is_contiguous(memory_format=torch.channels_last)
                strides = parameter.stride() if dense else torch.empty(parameter.shape, device="meta").stride()
                place = buffer.as_strided(parameter.shape, strides, start).copy_(parameter.detach())
                parameter.data = place
                self._places.append((parameter, place))
                self._addresses.append(place.data_ptr())
            self._flat_buffers.append((rank, buffer))

    def owner(self, parameter: nn.Parameter) -> int | None:
        """The rank that steps ``parameter``; None: nobody does."""
        number = id(parameter)
        return next((owners[number] for _, owners in self._whole if number in owners), None)

    def take_in(self) -> None:
        """Before a step: weights that somebody has put elsewhere (``p.data = ...``) are copied to where they lay.

        Raises:
            MisuseError: they have another shape or type.
        """
        if [parameter.data_ptr() for parameter, _ in self._places] != self._addresses:
            for parameter, place in self._places:
                put_back(parameter, place)

    def broadcast(self) -> None:
        """Sends every rank what each has stepped: one broadcast a rank, all at the same time."""
        works = [dist.broadcast(buffer, src=rank, async_op=True) for rank, buffer in self._flat_buffers]
        for work in works:
            work.wait()

    def restore(self, optimizers: Sequence[Optimizer]) -> None:
        """Gives every optimizer all of its parameters back, with their state, and each its own memory; a collective.

        Every rank gets the masters of the weights, too. A rank that ends alone keeps its own state and sends nothing.

        Args:
            optimizers: those of :meth:`partition`.
        """
        alone = self._ends_alone()
        for optimizer, (groups, owners) in zip(optimizers, self._whole, strict=True):
            for group, parameters in zip(optimizer.param_groups, groups, strict=False):  # some may be new
                group["params"] = parameters
            held = [p for parameters in groups for p in parameters]
            own = {
                i: tree_map_only(Tensor, _Sent.of, dict(optimizer.state[p]))
                for i, p in enumerate(held)
                if owners[id(p)] == self._world.rank and p in optimizer.state
            }
            for rank, given in enumerate([] if alone else self._world.all_gather_object(own)):
                for i, state in given.items() if rank != self._world.rank else ():
                    optimizer.state[held[i]] = {name: _placed(value, held[i].device) for name, value in state.items()}
            for parameter in held:
                parameter.data = parameter.detach().clone()
                stepped = None if alone else self.weights.whole(parameter)
                if stepped is not None:
                    dist.broadcast(stepped, src=owners[id(parameter)])
        self._flat_buffers, self._whole, self._places, self._addresses = [], [], [], []

    def _ends_alone(self) -> bool:
        """Whether an error is handled that this rank may have alone (of its disk, of a loading process, of the user's).

        The others do something else then: its own state is all there is, and the log says so.
        """
        error = sys.exc_info()[1]
        if isinstance(error, DistaccumError):  # every rank has one, unless it puts another error in words
            error = error.__cause__
        alone = error is not None and not isinstance(error, DistaccumError)
        if alone:
            _log.warning(
                "closed while %s is handled: the optimizers have this rank's share of their state", repr(error)
            )
        return alone


class _Sent(NamedTuple):
    """A tensor of an optimizer's state on its way to another rank."""

    tensor: Tensor
    on_host: bool

    @classmethod
    def of(cls, tensor: Tensor) -> _Sent:
        return cls(tensor.cpu(), tensor.device.type == "cpu")


def _placed(value: Any, device: torch.device) -> Any:
    if not isinstance(value, _Sent):
        return value
    return value.tensor if value.on_host else value.tensor.to(device)


def _aligned(parameter: nn.Parameter) -> int:
    """Its elements, and those up to the next aligned address."""
    unit = _ALIGNMENT // parameter.element_size()
    return -(-parameter.numel() // unit) * unit
