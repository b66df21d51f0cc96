"""The blocks of a sharded model: when they reduce, what is gathered, and in which order forwards run them.

A block's forward and backward gather its weights, and its backward reduces their gradients: collectives that every rank
must run in one order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_map_only

from distaccum.engines.fsdp2 import internals
from distaccum.errors import MisuseError

OTHER_BLOCKS = (
    "ranks ran different blocks in a forward, or in another order, so that one block's weights were gathered into "
    "another's: a rank may leave out a block on this engine (fsdp2), but not repeat one or change the order by itself. "
    "Or use ddp with find_unused_parameters"
)
_ORDERS = 2**16 - 15  # checksums of the order of blocks; a prime


class Units:
    """The model and its blocks: whether their backwards reduce, and whether a forward has left them gathered.

    Args:
        model: sharded.
        every: whether each micro-step reduces; else the window's last.
        reshards: whether a block is freed after its forward.
    """

    def __init__(self, model: nn.Module, *, every: bool, reshards: bool) -> None:
        self.modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self.every = every
        self.gathered = False
        """Whether a forward has gathered weights that no backward has freed since."""
        self._reduce: bool | None = None
        if not reshards:  # but all at once, after the backward
            self.modules[0].set_reshard_after_backward(False)

    def reduce(self, *, sync: bool) -> None:
        """Whether the next backward reduces. Only the engine's own does: another one in a window reduces nothing.

        Args:
            sync: it is the window's last.
        """
        if self._reduce is not (reduce := sync or self.every):
            self._reduce = reduce
            for unit in self.modules:
                unit.set_requires_gradient_sync(reduce, recurse=False)

    @contextmanager
    def local(self) -> Iterator[None]:
        """Within the block only a window's last micro-step reduces."""
        every, self.every = self.every, False
        try:
            yield
        finally:
            self.every = every

    def free(self) -> None:
        """Frees what a forward without a backward after it has left gathered, so that no step leaves it stale."""
        if self.gathered:
            self.gather_anew()
            self.gathered = False

    def gather_anew(self) -> None:
        """Frees all, so that the next forward gathers the shards as they are."""
        for unit in self.modules:
            unit.reshard()


class BlockOrder:
    """The order in which a window's forwards ran the blocks, as a checksum; and what reentrant checkpoints run again.

    Args:
        in_backward: whether the engine's own backward runs.
    """

    def __init__(self, in_backward: Callable[[], bool]) -> None:
        self.checksum = 0
        self._in_backward = in_backward
        self._checkpointed: dict[nn.Module, int] = {}  # recomputed so often, by block that ran without gradients

    def forward_begins(self) -> None:
        """Told of the whole model's."""
        if not self._in_backward():
            self._checkpointed.clear()

    def note(self, number: int, block: nn.Module) -> None:
        """Notes a block that communicates, and how often a reentrant checkpoint computes it again.

        That is a forward without gradients, then one with gradients in the backward.

        Raises:
            MisuseError: twice in one backward. FSDP2 reduces after the first, and the second is lost.
        """
        if not self._in_backward():
            self.checksum = (self.checksum * 31 + number + 1) % _ORDERS
        if not torch.is_grad_enabled():
            self._checkpointed[block] = 0
        elif self._in_backward() and block in self._checkpointed:
            self._checkpointed[block] += 1
            if self._checkpointed[block] > 1:
                problem = (
                    f"a reentrant checkpoint computes a block ({type(block).__name__}) again twice in one backward"
                )
                remedy = "FSDP2 loses a gradient of it: use checkpoint(..., use_reentrant=False)"
                raise MisuseError(f"{problem}, for two places or two forwards. {remedy}")


# Blocks that some rank's forward leaves out: experts chosen by the data, LayerDrop, conditional heads.
#
# The order is a plan that all ranks share. Where a forward leaves out a block of it, what goes on to the next block
# passes through the block unchanged, with all that the block communicates.


class SkippedBlocks:
    """Has every forward of a model run its blocks' collectives in the order of the plan.

    The plan begins with the order in which the model lists its blocks. A window whose forwards ran them in another one,
    the same in each forward and on each rank, makes that the plan. A block that is run where the plan has it no more
    stays outside of it: ranks must then do it alike.

    Args:
        model: sharded; whose forward is the whole.
        active: whether a forward is the user's own or a replay of it, and not a part that a backward computes again.
        visit: called with the number of each block, and the block, in the order in which they communicate.
    """

    def __init__(self, model: nn.Module, active: Callable[[], bool], visit: Callable[[int, nn.Module], None]) -> None:
        self._blocks = [module for module in model.modules() if isinstance(module, FSDPModule) and module is not model]
        self._active, self._visit = active, visit
        self._plan = list(range(len(self._blocks)))
        self._at: int | None = None  # in the plan, while a forward runs
        self._grad = False  # whether it has gradients
        self._seen: list[int] = []  # in this forward, but for what passed
        self._strays = False  # from the plan
        self._window: set[tuple[int, ...]] = set()  # the orders of its forwards, () where one keeps to the plan
        numbers = {block: number for number, block in enumerate(self._blocks)}
        self._inner = [{numbers[m] for m in block.modules() if m in numbers} - {n} for block, n in numbers.items()]
        self.hooks: list[Any] = []
        if self._blocks:
            self.hooks += [
                model.register_forward_pre_hook(self._begin, prepend=True),
                model.register_forward_hook(self._end, prepend=True),
            ]
        for number, block in enumerate(self._blocks):
            # Before FSDP2's own, which gathers this one.
            enter = partial(self._enter, number)
            self.hooks += [block.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)]
            if self._inner[number]:
                self.hooks += [block.register_forward_hook(partial(self._leave, number), prepend=True)]

    @property
    def proposal(self) -> int:
        """A checksum of the order in which every forward of the window ran the blocks, where it is not the plan's."""
        return crc32(repr(self._proposed()).encode()) if self._proposed() else 0

    def begin_window(self, *, agreed: bool) -> None:
        """Forgets the last window's forwards; where all ranks made the same :attr:`proposal` it becomes the plan."""
        if agreed and self._proposed():
            self._plan = [*self._proposed(), *(n for n in self._plan if n not in self._proposed())]
        self._window.clear()

    def _proposed(self) -> tuple[int, ...]:
        return next(iter(self._window)) if len(self._window) == 1 else ()

    def _begin(self, *_: object) -> None:
        if self._active():
            self._at, self._grad, self._strays = 0, torch.is_grad_enabled(), False
            self._seen.clear()

    def _end(self, _: nn.Module, __: Any, output: Any) -> Any:
        if self._at is None or not self._active():
            return output
        output = self._pass(self._plan[self._at :], output)
        self._at = None
        self._window.add(tuple(self._seen) if self._strays else ())
        return output

    def _enter(self, number: int, block: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._at is None or not self._active():
            self._visit(number, block)
            return None
        self._seen.append(number)
        given = (args, kwargs)
        if number in self._plan[self._at :]:
            at = self._plan.index(number, self._at)
            given = self._pass(self._plan[self._at : at], given)
            self._at = at + 1
        else:
            self._strays = True
        self._visit(number, block)
        return given

    def _leave(self, number: int, _: nn.Module, __: Any, output: Any) -> Any:
        """Of a block that holds others: those that it has left out."""
        if self._at is None or not self._active():
            return output
        end = self._at
        while end < len(self._plan) and self._plan[end] in self._inner[number]:
            end += 1
        output = self._pass(self._plan[self._at : end], output)
        self._at = end
        return output

    def _pass(self, numbers: Sequence[int], value: Any) -> Any:
        if not numbers:
            return value
        if self._grad and not torch.is_grad_enabled():
            name = type(self._blocks[numbers[0]]).__name__
            problem = f"a forward left out a block ({name}) before one that a reentrant checkpoint computes again"
            raise MisuseError(f"{problem}, and ranks may differ in it: use checkpoint(..., use_reentrant=False)")
        tensors = _tensors(value)
        if torch.is_grad_enabled():
            carried = [tensor for tensor in tensors if tensor.requires_grad]
            carried = carried or [tensor for tensor in tensors if tensor.is_floating_point()][:1]
        else:
            carried = []
        passed = self._through(list(numbers), carried)
        new = {id(old): tensor for old, tensor in zip(carried, passed, strict=True)}
        return _mapped(value, lambda tensor: new.get(id(tensor), tensor)) if new else value

    def _through(self, numbers: list[int], tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        while numbers:
            number = numbers.pop(0)
            inner: list[int] = []
            while numbers and numbers[0] in self._inner[number]:
                inner.append(numbers.pop(0))
            block = self._blocks[number]
            self._visit(number, block)
            tensors = internals.pass_through(block, tensors, partial(self._through, inner))
        return tensors


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    _mapped(value, note)
    return found


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The value with other tensors, also in dataclasses that pytrees do not know."""
    one: Callable[[Any], Any] = lambda leaf: _leaf(leaf, change)  # noqa: E731
    return tree_map_only(object, one, value)


def _leaf(leaf: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(leaf, Tensor):
        return change(leaf)
    if not is_dataclass(leaf) or isinstance(leaf, type):
        return leaf
    twin = copy(leaf)
    for item in fields(leaf):
        if hasattr(leaf, item.name):
            object.__setattr__(twin, item.name, _mapped(getattr(leaf, item.name), change))
    return twin
