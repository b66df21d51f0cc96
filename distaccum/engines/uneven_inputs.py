"""Uneven inputs where a forward is a collective: ranks with fewer micro-batches replay an earlier micro-step.

A micro-step is replayed as a whole: every forward of it, in its grad mode, and the backward where it stood between
them. The gradient of a replay is zero.
"""

from __future__ import annotations

from binascii import crc32
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from typing import Any, Self
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_flatten, tree_map_only

from distaccum.distributed.random import fork_rng
from distaccum.distributed.world import World
from distaccum.errors import MisuseError

_UNKNOWN = -1  # in place of a recording's checksum
_ALIKE = "call it alike in every micro-batch, or use an engine whose forward communicates nothing"
_WHOLE = "use an engine that holds whole parameters (ddp, zero1)"
_ELSEWHERE = "use an engine whose forward communicates nothing, or a global batch that all ranks share evenly"


@dataclass
class _Forward:
    """One call of the model."""

    args: Any
    kwargs: Any
    grad: bool
    inference: bool
    training: bool

    @property
    def mark(self) -> str:
        """What all ranks must have in common."""
        return "i" if self.inference else "g" if self.grad else "n"

    def mapped(self, change: Callable[[Tensor], Tensor]) -> _Forward:
        """With other tensors."""
        args, kwargs = tree_map_only(Tensor, change, (self.args, self.kwargs))
        return replace(self, args=args, kwargs=kwargs)


class _Bare:
    """What has no tensors."""

    def mapped(self, _: Callable[[Tensor], Tensor]) -> Self:
        """As it is."""
        return self


@dataclass
class _Backward(_Bare):
    """A backward, and the outputs that it reached: the forward's number in the micro-step, and the tensor's in it."""

    reached: set[tuple[int, int]] = field(default_factory=set)

    mark = "b"


@dataclass
class _GivenUp(_Bare):
    """The window is given up before its first micro-step."""

    mark = "given up"


@dataclass
class _Failed(_Bare):
    """The micro-step has ended with an error, which says why."""

    reason: str

    mark = "failed"


@dataclass
class _Crossed(_Bare):
    """Another model is called, which cannot be replayed."""

    mark = "crossed"


_ALL: WeakSet[UnevenInputs] = WeakSet()  # of this process: two models may be trained in turns, as in a GAN
_Event = _Forward | _Backward | _GivenUp | _Failed | _Crossed
_Outputs = list[dict[int, Tensor]]  # of each forward, by number: those that a backward can reach


class UnevenInputs:
    """Records what a micro-step does with the model, and replays it where other ranks have one micro-step more.

    Every micro-step must call the model as often as any other, in the same grad modes. A rank that has recorded none
    yet is told what another rank does in its first micro-step, while it does it.

    Args:
        model: whose forward is a collective.
        world: this rank.
        meet: called before a forward that is in no micro-step.
    """

    def __init__(self, model: nn.Module, world: World, meet: Callable[[], object] = lambda: None) -> None:
        self._model, self._meet = model, meet
        self._world = world
        self._recorded: list[_Event] = []  # a whole micro-step
        self._events: list[_Event] = []  # of the current one
        self._outputs: _Outputs = []  # of the current one, while ranks are uneven
        self._nodes: dict[tuple[Any, int], tuple[int, int]] = {}  # the same, by where autograd made them
        self._ends: list[tuple[Any, Callable[[], Tensor]]] = []  # of the current one's graphs; each makes zeros for it
        self._leaf_hooks: list[Any] = []
        self._inside = False  # a micro-step
        self._failed = False  # that an error has ended
        self._unfinished = False  # a forward, or a backward, that an error may have ended
        self._backward: _Backward | None = None  # while it runs
        self._touched = False  # the model, by that backward
        self._differentiated = False  # the model, by something other than the backward, in any micro-step
        self._crossed = False  # a micro-step has called another model of these
        self._source: int | None = None  # the rank that tells what it does, until its first micro-step is over
        self._uneven = self._empty = False  # ranks, or one of them, in the current window
        self._told_now = False  # in the current window ranks are told what to replay
        self._forgets = False  # what was recorded, at the next window
        self.alike = False  # ranks, in what they gave to be compared, in the current window
        self.left = 0  # micro-steps of the current window that other ranks may wait in; 0 where all have as many
        self.replays = False
        self.differentiates = False  # a backward runs, of the loss or for nothing
        _ALL.add(self)
        # The first of all hooks: others wait for ranks that wait for what this one tells.
        self._hooks = [
            model.register_forward_pre_hook(self._before_forward, with_kwargs=True, prepend=True),
            # Before an engine's own, whose hooks on the output wait for other ranks in the backward.
            model.register_forward_hook(self._after_forward, prepend=True),
        ]

    def remove(self) -> None:
        """Removes the hooks on the model."""
        for hook in self._hooks:
            hook.remove()

    @property
    def called(self) -> bool:
        """Whether the current micro-step has called the model for a gradient."""
        return any(isinstance(event, _Forward) and event.grad for event in self._events)

    def begin_micro_step(self) -> None:
        """Called before a micro-step's first forward."""
        self._forget_current()
        self._inside, self._failed = True, False

    def end_micro_step(self) -> None:
        """Called when a micro-step has run to its end; not after an error in it."""
        if not self._inside:
            return
        self._tell(None)
        if any(isinstance(event, _Backward) for event in self._events):
            self._recorded = self._events
        self._forget_current()
        self._count_down()

    def fail(self, error: Exception) -> None:
        """Called when an error ends a micro-step: ranks that are told what it does raise too, instead of waiting.

        Inside a forward or a backward they wait elsewhere, and cannot be told.
        """
        self._failed = True
        if self._inside and not self._unfinished:
            told = self._source is not None
            self._tell(_Failed(str(error)))
            if told:  # nobody waits any more
                self.left, self._source = 0, None
                self._forget_current()

    @contextmanager
    def backward(self, loss: Tensor) -> Iterator[None]:
        """Around a micro-step's backward of ``loss``."""
        self._backward, self._touched = _Backward(), False
        if self._source is not None:
            # A loss that depends on none is followed by a backward for nothing, of all: see `unreached`.
            self._backward.reached = _reached(loss, self._nodes) or set(self._nodes.values())
        self._tell(self._backward)
        self._events.append(self._backward)
        self._nodes.clear()
        self._unfinished = True
        with self._differentiating():
            yield
        self._unfinished, self._backward, self._ends = False, None, []
        self._outputs = [{} for _ in self._outputs]

    def unreached(self) -> tuple[list[Any], list[Tensor]]:
        """Called in a backward, at its end: where it has not reached the model at all, the ends of the model's graphs.

        With zeros for them: other ranks' backwards may have reached it, and communicate.
        """
        if self._touched:
            return [], []
        return [edge for edge, _ in self._ends], [zeros() for _, zeros in self._ends]

    def missing_steps(self, micro_steps: int, *, like: int = 0) -> int:
        """How many micro-steps this rank has to replay, given its own ``micro_steps``; a small host all-reduce.

        :attr:`alike` then says whether all ranks gave the same ``like``.

        Raises:
            MisuseError: some rank has to replay, and ranks call the model differently, or differentiate it by hand.
        """
        self._forget_current()
        if self._forgets:
            self._recorded, self._forgets = [], False
        size, rank, known = self._world.size, self._world.rank, bool(self._recorded)
        # The source: of the ranks with most micro-steps one that has recorded some, and the first of these.
        code = (micro_steps * 2 + known) * size + size - 1 - rank
        marks = crc32("".join(event.mark for event in self._recorded).encode()) if known else _UNKNOWN
        own = [code, -micro_steps, -int(known), marks, -marks if known else -(2**32)]
        own += [int(self._differentiated), int(self._crossed), like, -like]
        code, fewest, least, most_marks, least_marks, differentiated, crossed, highest, lowest = (
            self._world.all_reduce_max_host(own)
        )
        self.alike = highest == -lowest
        most, source, fewest = code // size // 2, size - 1 - code % size, -fewest
        self._uneven, self._empty, self._told_now, self._source = most > fewest, fewest == 0, False, None
        self.left = 0
        if not self._uneven:
            return 0
        if most_marks not in (_UNKNOWN, -least_marks):
            problem = "the loss calls the model a different number of times, or in other grad modes, on different ranks"
            raise MisuseError(f"{problem}, and these have different numbers of micro-batches: {_ALIKE}")
        if differentiated:
            raise _by_hand()
        if crossed:
            raise _in_anothers()
        self.left = most
        if not least:
            if code // size % 2:  # the source knows
                self._share(source)
            else:
                self._source, self._told_now = source, True
        return most - micro_steps

    def _share(self, source: int) -> None:
        own = source == self._world.rank
        box: list[Any] = [[event.mapped(_to_host) for event in self._recorded] if own else None]
        self._broadcast(box, source)
        if not self._recorded:
            self._recorded = [event.mapped(self._to_device) for event in box[0]]

    def replay(self, autocast: Callable[[], AbstractContextManager[Any]]) -> None:
        """Runs a micro-step whose gradient is zero; random generators and buffers stay as they were.

        Args:
            autocast: makes the context of each forward.
        """
        with self._without_trace():
            if self._source is None:
                assert self._recorded, "no rank has a micro-batch"
                self._run(self._recorded, [], autocast)
            else:
                self._recorded = self._run(self._told(self._source), [], autocast)
                self._source = None
        self._count_down()

    def check_release(self) -> None:
        """Called on all ranks, before a window is given up in which others wait for this one (:attr:`left`).

        Raises:
            MisuseError: they cannot be released.
        """
        problem = "abandon() where ranks have different numbers of micro-batches,"
        if self.left and self._empty:
            raise MisuseError(f"{problem} and one of them has none: it waits in the step. Abandon between windows")
        if self.left and self._unfinished:
            problem += " after an error in the model's forward or backward: the others wait in it"
            raise MisuseError(f"{problem}. End the job, and resume from a checkpoint")

    def finish_micro_step(self, autocast: Callable[[], AbstractContextManager[Any]]) -> None:
        """Runs the rest of a micro-step that is given up, with a gradient of zero; the caller replays :attr:`left`."""
        self._forgets = self._told_now  # what was recorded was not finished as the loss would have
        if not self._inside:
            if self._source is not None:  # nobody has begun
                self._tell(_GivenUp())
                self.left, self._source = 0, None
            return
        rest: list[_Event] = self._recorded[len(self._events) :]
        if self._told_now:
            rest = []
            if not any(isinstance(event, _Backward) for event in self._events):
                rest = [_Backward({(i, j) for i, outputs in enumerate(self._outputs) for j in outputs})]
        outputs, self._outputs = self._outputs, []
        with self._without_trace():
            for event in rest:
                self._tell(event)
                self._run([event], outputs, autocast)
        self._tell(None)
        if self._told_now:
            self._recorded = self._events + rest
        self._forget_current()
        self._count_down()

    def _count_down(self) -> None:
        self.left = max(self.left - 1, 0)

    def _forget_current(self) -> None:
        self._inside = self._unfinished = False
        self._events, self._outputs, self._backward, self._ends = [], [], None, []
        self._nodes.clear()
        while self._leaf_hooks:
            self._leaf_hooks.pop().remove()

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.replays:
            return
        if self._backward is not None:  # an activation checkpoint around the whole model
            if self._uneven:
                problem = "the whole model is computed again in the backward (an activation checkpoint)"
                raise MisuseError(
                    f"{problem}, and ranks have different numbers of micro-batches: checkpoint its blocks"
                )
            return
        if not self._inside:
            if self.left:
                problem = "the model was called between two micro-batches, of which ranks have different numbers"
                raise MisuseError(f"{problem}: call it in a micro-step, or between windows")
            for other in _ALL:
                if other._inside and not other._failed:
                    other._crossed = True
                    if other._uneven:
                        other._tell(_Crossed())
                        other._source = None  # who waited has been told
                        raise _in_anothers()
            self._meet()
            return
        grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        event = _Forward(args, kwargs, grad=grad, inference=inference, training=module.training).mapped(_leaf)
        self._unfinished = True
        self._tell(event)
        self._events.append(event)

    def _after_forward(self, _: nn.Module, __: Any, output: Any) -> None:
        if self.replays or not self._inside or self._backward is not None:
            return
        self._unfinished = False
        number = len(self._outputs)
        kept: dict[int, Tensor] = {}
        if torch.is_grad_enabled():
            for i, tensor in _grown(output):
                hook = tensor.register_hook(partial(self._reach, number, i))  # type: ignore[no-untyped-call]
                if tensor.is_leaf:  # a parameter, which stays
                    self._leaf_hooks.append(hook)
                else:
                    zeros = partial(torch.zeros, tensor.shape, dtype=tensor.dtype, device=tensor.device)
                    self._ends.append((get_gradient_edge(tensor), zeros))
                if self._uneven:
                    kept[i] = tensor
                if self._source is not None:
                    edge = get_gradient_edge(tensor)
                    self._nodes[edge.node, edge.output_nr] = number, i
        self._outputs.append(kept)

    def _reach(self, number: int, i: int, _: Tensor) -> None:
        if self._backward is not None:
            self._touched = True
            self._backward.reached.add((number, i))
        elif self._inside and not self.replays:
            error = None
            if torch.is_grad_enabled():
                problem = "the model is differentiated twice (create_graph=True, as for a gradient penalty)"
                error = MisuseError(f"{problem}, and its layers are freed by the first time: {_WHOLE}")
            self._differentiated = True
            if error is None and self._uneven:
                error = _by_hand()
            if error is not None:
                self.fail(error)
                raise error

    def _tell(self, event: _Event | None) -> None:
        """Tells the ranks that have recorded nothing; None: the micro-step is over."""
        if self._source is None:
            return
        own = self._source == self._world.rank
        box: list[Any] = [event.mapped(_to_host) if own and event is not None else None]
        self._broadcast(box, self._source)
        if not own and type(box[0]) is not type(event) and not isinstance(event, _Failed):
            raise MisuseError(
                f"ranks call the model differently, and have different numbers of micro-batches: {_ALIKE}"
            )
        if event is None:
            self._source = None

    def _told(self, source: int) -> Iterator[_Event]:
        while True:
            box: list[Any] = [None]
            self._broadcast(box, source)
            if box[0] is None:
                return
            if isinstance(box[0], _GivenUp):
                self.left = 0
                return
            if isinstance(box[0], _Failed | _Crossed):
                self.left, self._source = 0, None  # nobody waits for this rank
            if isinstance(box[0], _Failed):
                raise MisuseError(f"on another rank, which this one waited for: {box[0].reason}")
            if isinstance(box[0], _Crossed):
                raise _in_anothers()
            yield box[0].mapped(self._to_device)

    def _broadcast(self, box: list[Any], source: int) -> None:
        dist.broadcast_object_list(box, src=source, device=torch.device("cpu"), group=self._world.host_group)

    def _to_device(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(self._world.device).requires_grad_(tensor.requires_grad)

    @contextmanager
    def _without_trace(self) -> Iterator[None]:
        self.replays = True
        buffers = [(buffer, buffer.clone()) for buffer in self._model.buffers()]  # statistics: an input counts once
        try:
            with fork_rng([self._world.device]):
                yield
        finally:
            self.replays = False
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)

    @contextmanager
    def _differentiating(self) -> Iterator[None]:
        self.differentiates = True
        try:
            yield
        finally:
            self.differentiates = False

    def _run(
        self, events: Iterable[_Event], outputs: _Outputs, autocast: Callable[[], AbstractContextManager[Any]]
    ) -> list[_Event]:
        """Runs the events, which it returns, after others that gave ``outputs``."""
        done: list[_Event] = []
        for event in events:
            done.append(event)
            if isinstance(event, _Backward):
                used = [outputs[number][i] for number, i in sorted(event.reached) if i in outputs[number]]
                again = not isinstance(events, Sequence) or _Backward in map(type, events[len(done) :])
                with self._differentiating():
                    if used:
                        torch.autograd.backward(used, [torch.zeros_like(output) for output in used], retain_graph=again)
                continue
            assert isinstance(event, _Forward)
            call = event.mapped(_leaf)
            with autocast(), _mode(self._model, call):
                output = self._model(*call.args, **call.kwargs)
            outputs.append(dict(_grown(output)) if call.grad else {})
        return done


def _by_hand() -> MisuseError:
    problem = "the model is differentiated by hand (autograd.grad, or loss.backward() in place of acc.backward(loss))"
    return MisuseError(f"{problem} where ranks have different numbers of micro-batches: {_ELSEWHERE}")


def _in_anothers() -> MisuseError:
    problem = "the model was called in another one's micro-step, and ranks have different numbers of these"
    return MisuseError(f"{problem}: {_ELSEWHERE}")


def _leaf(tensor: Tensor) -> Tensor:
    """The same values; whether an input needs a gradient decides when a sharded layer is freed."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _to_host(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().requires_grad_(tensor.requires_grad)


@contextmanager
def _mode(model: nn.Module, call: _Forward) -> Iterator[None]:
    """The grad mode of a call, and the model's training mode."""
    flags = [] if model.training == call.training else [(module, module.training) for module in model.modules()]
    if flags:
        model.train(call.training)
    try:
        with torch.inference_mode() if call.inference else torch.set_grad_enabled(call.grad):
            yield
    finally:
        for module, training in flags:
            module.training = training


def _reached(loss: Tensor, nodes: dict[tuple[Any, int], tuple[int, int]]) -> set[tuple[int, int]]:
    """Which of the outputs that autograd made at ``nodes`` the loss depends on."""
    found: set[tuple[int, int]] = set()
    seen: set[tuple[Any, int]] = set()
    left: list[tuple[Any, int]] = [(loss.grad_fn, loss.output_nr)]
    while left:
        edge = left.pop()
        if edge[0] is None or edge in seen:
            continue
        seen.add(edge)
        if edge in nodes:
            found.add(nodes[edge])
        left += edge[0].next_functions
    return found


def _grown(output: Any) -> Iterator[tuple[int, Tensor]]:
    """The tensors of an output that a backward can reach, numbered."""
    for i, leaf in enumerate(leaves(output)):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            yield i, leaf


def is_record(value: object) -> bool:
    """Whether it is an object of a user's class, whose attributes may be tensors that a model returns."""
    library = type(value).__module__.partition(".")[0] in ("builtins", "torch", "numpy", "distaccum")
    return not library and hasattr(value, "__dict__") and not isinstance(value, Tensor | nn.Module | type)


def leaves(value: Any) -> Iterator[Any]:
    """Of a pytree, and of dataclasses and objects of users' classes in it."""
    for leaf in tree_flatten(value)[0]:
        if isinstance(leaf, Tensor):
            yield leaf
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            for item in fields(leaf):
                yield from leaves(getattr(leaf, item.name, None))
        elif is_record(leaf):
            yield from tree_flatten(list(vars(leaf).values()))[0]
        else:
            yield leaf
