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
from distaccum.engines.uneven_inputs import is_record, leaves
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
        self._set: tuple[bool, bool] | None = None
        if not reshards:  # but all at once, after the backward
            self.modules[0].set_reshard_after_backward(False)

    def reduce(self, *, sync: bool) -> None:
        """Whether the next backward reduces. Only the engine's own does: another one in a window reduces nothing.

        Replicas add up their shards in the window's last alone.

        Args:
            sync: it is the window's last.
        """
        if self._set != (wanted := (sync or self.every, sync)):
            self._set = wanted
            for unit in self.modules:
                unit.set_requires_gradient_sync(wanted[0], recurse=False)
                unit.set_requires_all_reduce(sync, recurse=False)

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
# The order is a plan that all ranks share. Where a forward leaves out a block of it, what the block communicates is
# communicated all the same. A backward does so in the forward's order reversed, whatever of the blocks' outputs it
# reaches: of the nodes that are ready autograd runs the one that was made last, and each block has one that is made
# before its forward and one after it. These hang together, and on the model's output.


class SkippedBlocks:
    """Has every forward of a model, and its backward, run its blocks' collectives in the order of the plan.

    The plan begins with the order in which the model lists its blocks. A window whose forwards ran them in another one,
    the same in each forward and on each rank, makes that the plan. A block that is run where the plan has it no more
    stays outside of it: ranks must then do it alike.

    Args:
        model: sharded; whose forward is the whole.
        active: whether a forward is the user's own or a replay of it, and not a part that a backward computes again.
        visit: called with the number of each block, and the block, in the order in which they communicate.
        device: of the forward; None where there is no other rank, and the backward needs no order.
    """

    def __init__(
        self,
        model: nn.Module,
        active: Callable[[], bool],
        visit: Callable[[int, nn.Module], None],
        device: torch.device | None,
    ) -> None:
        self._blocks = [module for module in model.modules() if isinstance(module, FSDPModule) and module is not model]
        self._active, self._visit, self._device = active, visit, device
        self._plan = list(range(len(self._blocks)))
        self._at: int | None = None  # in the plan, while a forward runs
        self._grad = False  # whether it has gradients
        self._token: Tensor | None = None  # the last node of its blocks
        self._seen: list[int] = []  # in this forward, but for what passed
        self._begun: set[int] = set()  # of these, with gradients
        self._strays = False  # from the plan
        self._window: set[tuple[int, ...]] = set()  # the orders of its forwards, () where one keeps to the plan
        numbers = {block: number for number, block in enumerate(self._blocks)}
        self._inner = [{numbers[m] for m in block.modules() if m in numbers} - {n} for block, n in numbers.items()]
        self.hooks: list[Any] = [unit.register_forward_hook(_expect_backward) for unit in (model, *self._blocks)]
        if self._blocks:
            self.hooks += [
                model.register_forward_pre_hook(self._begin, prepend=True, with_kwargs=True),
                model.register_forward_hook(self._end, prepend=True),
            ]
        for number, block in enumerate(self._blocks):
            # Before FSDP2's own, which gathers this one.
            self.hooks += [
                block.register_forward_pre_hook(partial(self._enter, number), prepend=True),
                block.register_forward_hook(partial(self._leave, number), prepend=True),
            ]

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

    def _begin(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        if self._active():
            self._at, self._grad, self._strays = 0, torch.is_grad_enabled(), False
            self._token = None
            if self._grad and self._device is not None and not torch.compiler.is_compiling():
                # Without elements, so that nothing is computed; on the device, whose nodes autograd has a thread for.
                first = torch.empty(0, device=self._device, requires_grad=True)
                # autograd.grad by an input runs what leads to that.
                self._token = internals.Acts.apply(lambda: None, first, *_tensors((args, kwargs)))  # type: ignore[no-untyped-call]
            self._seen.clear()
            self._begun.clear()

    def _end(self, _: nn.Module, __: Any, output: Any) -> Any:
        if self._at is None or not self._active():
            return output
        self._pass(self._plan[self._at :])
        self._at = None
        self._window.add(tuple(self._seen) if self._strays else ())
        token, self._token = self._token, None
        grown = {id(tensor): tensor for tensor in _tensors(output) if tensor.grad_fn is not None}
        if token is None or not grown:
            return output
        tied = dict(zip(grown, internals.Tie.apply(token, *grown.values()), strict=True))  # type: ignore[no-untyped-call]
        return _mapped(output, lambda tensor: tied.get(id(tensor), tensor))

    def _enter(self, number: int, block: nn.Module, _: Any) -> None:
        if self._at is None or not self._active():
            self._visit(number, block)
            return
        self._seen.append(number)
        if number in self._plan[self._at :]:
            at = self._plan.index(number, self._at)
            self._pass(self._plan[self._at : at])
            self._at = at + 1
        else:
            self._strays = True
        self._visit(number, block)
        if torch.is_grad_enabled() and number not in self._begun:  # of several calls: gradients of all are there then
            self._begun.add(number)
            self._mark(block, internals.end_backward)

    def _leave(self, number: int, block: nn.Module, _: Any, __: Any) -> None:
        if self._at is None or not self._active():
            return
        end = self._at
        while end < len(self._plan) and self._plan[end] in self._inner[number]:  # blocks in it that it has left out
            end += 1
        self._pass(self._plan[self._at : end])
        self._at = end
        self._mark(block, internals.begin_backward)

    def _mark(self, block: nn.Module, act: Callable[[nn.Module], None]) -> None:
        """Has a backward do something of a block's when it comes to this place of the forward."""
        if self._token is not None and torch.is_grad_enabled():
            self._token = internals.Acts.apply(partial(act, block), self._token)  # type: ignore[no-untyped-call]

    def _pass(self, numbers: Sequence[int]) -> None:
        """Communicates what some blocks would, that are left out here."""
        if numbers and self._grad and not torch.is_grad_enabled():
            name = type(self._blocks[numbers[0]]).__name__
            problem = f"a forward left out a block ({name}) before one that a reentrant checkpoint computes again"
            raise MisuseError(f"{problem}, and ranks may differ in it: use checkpoint(..., use_reentrant=False)")
        left = list(numbers)
        while left:
            number = left.pop(0)
            inner: list[int] = []
            while left and left[0] in self._inner[number]:
                inner.append(left.pop(0))
            block = self._blocks[number]
            self._visit(number, block)
            self._mark(block, internals.end_backward)
            with internals.gathered(block):
                self._pass(inner)
            self._mark(block, internals.begin_backward)


def _expect_backward(block: nn.Module, _: Any, output: Any) -> None:
    """FSDP2 waits for gradients of pytrees' and dataclasses' tensors; here for those of an object of a user's class."""
    for tensor in _tensors(output) if is_record(output) and not is_dataclass(output) else ():
        tensor.register_hook(lambda _: internals.begin_backward(block))  # type: ignore[no-untyped-call]


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in leaves(value) if isinstance(leaf, Tensor) and leaf.requires_grad]


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The value with other tensors, also in dataclasses and objects of users' classes, which pytrees do not know."""

    def changed(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return change(leaf)
        if isinstance(leaf, type) or not (is_dataclass(leaf) or is_record(leaf)):
            return leaf
        twin = copy(leaf)
        if not is_dataclass(leaf):
            vars(twin).update(tree_map_only(Tensor, change, vars(leaf)))
        for item in fields(leaf) if is_dataclass(leaf) else ():
            if hasattr(leaf, item.name):
                object.__setattr__(twin, item.name, _mapped(getattr(leaf, item.name), change))
        return twin

    return tree_map_only(object, changed, value)
