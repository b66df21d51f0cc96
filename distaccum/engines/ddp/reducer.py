"""When DDP reduces: in backwards that are announced, and in no other. Torch has no public names for this.

All names of DDP's that torch may change are here, and are tried when an engine is made.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from distaccum.config.engine import DDPConfig
from distaccum.data.plan.units import UnitAssignment
from distaccum.distributed.world import World
from distaccum.errors import ConfigError, MisuseError, expect_peers
from distaccum.precision.policy import PrecisionPolicy

# What a training forward calls on DDP: torch's wrapper, which has the attributes and methods of the user's model.


class DDPModel(DistributedDataParallel):
    """``model.encode(x)``, ``model.head`` and ``model.config`` are the wrapped model's, as ``model.module`` is it.

    A forward by one of its parts or methods is as good as one of the whole: the reduction begins with a backward that
    the engine announces, and no forward takes part in it.

    Setting an attribute that the wrapped model has sets it there, where its forward reads it.
    """

    called: bool = False
    """Whether a forward, a method or a part of the model was asked for since this was last set to False."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        vars(self)["_is_made"] = True  # what torch's constructor sets is its own, also where the model has such a name

    @contextmanager
    def _inside_ddp_forward(self) -> Iterator[None]:
        """In place of what tells ``torch.compile`` to cut the model at the ends of DDP's buckets.

        It does so for a backward that overlaps with its reduction, which here one micro-step of many does; the cuts are
        in all of them, and a graph with a checkpoint cannot be cut. Blocks that are compiled one by one overlap.
        """
        yield

    def __getattr__(self, name: str) -> Any:
        """Called for what an instance's dictionary and the class have not: modules, torch's and the user's."""
        try:
            found = super().__getattr__(name)
        except AttributeError:
            module = vars(self).get("_modules", {}).get("module")
            if module is None:  # torch's own constructor is at work
                raise
            found = getattr(module, name)
            if isinstance(found, nn.Module) or callable(found):
                vars(self)["called"] = True
            return found
        if name == "module":  # torch's forward asks for it too
            vars(self)["called"] = True
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        own = name in vars(self) or hasattr(type(self), name) or "_is_made" not in vars(self)
        if own or name in self._modules or not hasattr(self._modules["module"], name):
            super().__setattr__(name, value)
        else:
            setattr(self._modules["module"], name, value)


# DDP would send all buffers at every boundary; see Engine.sync_buffers. torch 2.13 gave the argument a new name.
_renamed = "forward_sync_buffers" in signature(DistributedDataParallel).parameters
_NO_BUFFER_SYNC: Any = {"forward_sync_buffers" if _renamed else "broadcast_buffers": False}


def wrap(model: nn.Module, world: World, config: DDPConfig, policy: PrecisionPolicy) -> DDPModel:
    """DDP around a model; a collective, in which parameters become rank 0's, and buffers stay as they are."""
    # DDP would broadcast these, and gloo does not know all of their types; Engine.sync_buffers does.
    buffers = [name for name, _ in model.named_buffers(remove_duplicate=False)]
    odd = {name: p for name, p in model.named_parameters(remove_duplicate=False) if _is_odd(p)}
    for parameter in {id(parameter): parameter for parameter in odd.values()}.values():
        world.broadcast_(parameter.detach())
    with _dense_gradients(model), _ignoring(model, [*buffers, *odd]):
        return DDPModel(
            model,
            # It counts in the parameters' type, and buckets hold gradients.
            bucket_cap_mb=config.bucket_cap_mb * policy.parameter_dtype.itemsize / 4,
            gradient_as_bucket_view=True,
            # Its buckets would stay of the parameters' type: what a backward leaves out is completed by the engine.
            find_unused_parameters=config.find_unused_parameters and not policy.keeps_masters,
            **_NO_BUFFER_SYNC,
        )


def _is_odd(parameter: nn.Parameter) -> bool:
    """A frozen parameter, quantised perhaps, of a type that not every backend sends."""
    usual = parameter.is_complex() or (parameter.is_floating_point() and parameter.itemsize > 1)
    return not (parameter.requires_grad or usual)


@contextmanager
def _ignoring(model: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Within the block DDP leaves out these parameters and buffers of a model that it wraps."""
    vars(model)["_ddp_params_and_buffers_to_ignore"] = list(names)  # past __setattr__: a compiled model passes it on
    try:
        yield
    finally:
        del vars(model)["_ddp_params_and_buffers_to_ignore"]


@contextmanager
def _dense_gradients(model: nn.Module) -> Iterator[None]:
    """Within the block DDP sees no ``sparse=True``: a sparse gradient is then added to a dense one, in its bucket."""
    sparse = [m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse]
    for module in sparse:
        module.sparse = False
    try:
        yield
    finally:
        for module in sparse:
            module.sparse = True


GRAD_DTYPE = hasattr(Tensor, "grad_dtype")  # from torch 2.10 on: a gradient may have another type than its parameter
_NAMES = ("prepare_for_backward", "_check_reducer_finalized", "_rebuild_buckets", "_remove_autograd_hooks")
_TWICE = "mark a variable ready only once"
_BUCKET_DTYPE = "_set_mixed_precision_param_dtype"  # of all buckets; in place of their parameters' type
_UNREACHED = re.compile(r"Parameter indices which did not receive grad for rank \d+:((?: \d+)+)")


class Reduction:
    """DDP's reduction of one model's gradients.

    DDP announces a reduction in its forward. Then a forward whose backward never comes, or that belongs to another
    loss, shifts this rank's collectives against the others'. Here the backward itself is announced, and every forward
    is local. With ``find_unused_parameters`` DDP looks for unused parameters from the loss on, so that outputs which
    the loss leaves out count as unused.

    Args:
        ddp: right after it was made.
        parameters: those that it reduces, in its own order: the model's.

    Raises:
        ConfigError: this torch's DDP works in another way.
    """

    def __init__(self, ddp: DistributedDataParallel, parameters: Sequence[nn.Parameter]) -> None:
        self._reducer: Any = getattr(ddp, "reducer", None)
        self._parameters = parameters
        self._finds_unused = ddp.find_unused_parameters
        self.running = False
        self.ended: Callable[[], None] = _nothing
        """Called when a reduction has ended."""
        missing = [name for name in _NAMES if not hasattr(self._reducer, name)]
        if missing or not hasattr(ddp, "require_backward_grad_sync"):
            raise _other_torch(f"has no {', '.join(missing) or 'require_backward_grad_sync'}")
        ddp.require_backward_grad_sync = False

    def place_gradients(self, *, in_fp32: bool = False) -> None:
        """Makes every gradient a view of its bucket, by backwards that add nothing; a collective.

        DDP does so in its first synced backward, and rebuilds the buckets before its second. A window that first
        accumulates locally would hold gradients and buckets, twice, until then. The buckets keep the order that DDP
        assumes at first, the reverse of the parameters'.

        The first backward leaves a parameter out, to see that this torch tells.

        Args:
            in_fp32: buckets and gradients are fp32, also of parameters that are not.

        Raises:
            ConfigError: this torch's DDP works in another way.
        """
        if in_fp32 and not hasattr(self._reducer, _BUCKET_DTYPE):
            raise _other_torch(f"has no {_BUCKET_DTYPE}")
        if in_fp32 and GRAD_DTYPE:
            getattr(self._reducer, _BUCKET_DTYPE)(torch.float32)
        for left_out in (1, 0):
            for parameter in self._parameters:
                parameter.grad = None
                if in_fp32 and not (left_out or GRAD_DTYPE):  # else it would get its parameter's type
                    set_gradient(parameter, torch.zeros_like(parameter, dtype=torch.float32))
            reached = self._parameters[left_out:] or self._parameters
            with _hooks_aside(self._parameters):
                self.backward(_constant(reached, 0.0))
            unreached = self.unreached()
            complete = self._finds_unused or len(reached) == len(self._parameters)
            if unreached != ([] if complete else [0]):
                raise _other_torch(f"says of a backward without its parameter 0 that it was without {unreached}")
            self.complete(unreached, 0.0)
            if left_out:  # their memory goes before new buckets come, else there are two of each for a moment
                for parameter in self._parameters:
                    parameter.grad = None
                if in_fp32 and not GRAD_DTYPE:
                    getattr(self._reducer, _BUCKET_DTYPE)(torch.float32)
            self._reducer._rebuild_buckets()
        if in_fp32 and any(p.grad is None or p.grad.dtype is not torch.float32 for p in self._parameters):
            raise _other_torch("does not keep the gradients of bf16 parameters in fp32")

    def backward(self, loss: Tensor) -> None:
        """The backward of ``loss``, which reduces; :meth:`unreached` tells whether it has reduced everything."""
        self.running = True
        self._reducer.prepare_for_backward([loss])
        try:
            loss.backward()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            expect_peers(error)
            if _TWICE not in str(error):
                raise
            problem = "a backward reached a parameter twice, as of one that several reentrant checkpoints share"
            raise MisuseError(f"{problem}: give torch.utils.checkpoint use_reentrant=False") from error

    def unreached(self) -> list[int]:
        """The parameters that keep the reduction from its end, by number, of many the first 100; empty if it has ended.

        A backward that reached no parameter at all leaves it untouched: DDP then says nothing.
        """
        try:
            self._reducer._check_reducer_finalized()
        except RuntimeError as error:
            found = _UNREACHED.search(str(error))
            if found is None:
                raise _other_torch("does not say which parameters its reduction waits for") from error
            return [int(number) for number in found[1].split()]
        self.running = False
        try:
            self.ended()
        except RuntimeError as error:
            expect_peers(error)
            raise
        return []

    def complete(self, numbers: Sequence[int], value: float) -> None:
        """Ends the reduction with gradients of ``value`` for these parameters; the other ranks are waiting for it."""
        done = set[int]()
        while numbers and done.isdisjoint(numbers):
            left = [self._parameters[number] for number in numbers]
            with _needing_gradients(left), _hooks_aside(left):
                _constant(left, value).backward()  # type: ignore[no-untyped-call]
            done.update(numbers)
            numbers = self.unreached()  # torch names 100 at most
        if numbers or (not done and self.unreached()):
            raise _other_torch("does not end a reduction that was completed")

    def join(self, value: float) -> None:
        """A whole reduction with gradients of ``value``, which are added to what has accumulated."""
        with _needing_gradients(self._parameters), _hooks_aside(self._parameters):
            self.backward(_constant(self._parameters, value))
        self.complete(self.unreached(), value)

    def close(self) -> None:
        """Removes DDP's hooks from the parameters."""
        self._reducer._remove_autograd_hooks()


def reduced_in_dtype(dtype: torch.dtype, ranks: int) -> Callable[[object, Any], Any]:
    """A communication hook for DDP: divides each bucket by ``ranks``, and adds them up, sent in ``dtype``.

    Torch's own ``fp16_compress_hook`` casts before it divides: of 80000 and 20000 it makes infinity, though fp16 holds
    their average.
    """

    def reduce(whole: torch.Tensor) -> Any:
        divided = whole if ranks == 1 else whole.div_(ranks)
        sent = divided if dtype is torch.float32 else divided.to(dtype)  # fp64 stays what it is
        reduced = dist.all_reduce(sent, async_op=True).get_future()
        # Its value is asked for wherever it lies: that raises where another rank is gone.
        return reduced.then(lambda done: done.value()[0] if sent is whole else whole.copy_(done.value()[0]))

    return lambda _, bucket: reduce(bucket.buffer())  # DDP accepts its own annotations, as types, or none


class BucketReducer:
    """Adds up DDP's buckets over the ranks, which DDP by itself averages: what a backward sees is then the window's
    gradient on any number of ranks, also where a hook looks at its size.

    Args:
        world: this rank.
        dtype: what gradients travel in. In fp16, which a sum may exceed, it averages.
    """

    def __init__(self, world: World, dtype: torch.dtype = torch.float32) -> None:
        self.divisor = world.size if dtype is torch.float16 else 1
        """What the reduced gradient is still to be multiplied by."""
        self._world, self._dtype = world, dtype

    def attach(self, ddp: DistributedDataParallel) -> None:
        """Before the first backward."""
        if self._world.size > 1 or self._dtype is not torch.float32:
            ddp.register_comm_hook(None, reduced_in_dtype(self._dtype, self.divisor))

    def placed(self, gradients: Sequence[Tensor | None]) -> None:
        """Told that gradients lie in their buckets."""

    def begin(self, assignment: UnitAssignment | None) -> None:
        """A window begins."""

    def expect_assignment(self) -> None:
        """Before a reduction."""

    def micro_step_ended(self) -> None:
        """After each micro-step but the window's last."""

    def finish(self) -> None:
        """After the last bucket."""

    def give_up(self) -> None:
        """The window's gradient is NaN on this rank."""


def _nothing() -> None:
    pass


def accumulate_in_fp32(parameter: nn.Parameter) -> None:
    """Has a parameter of 16 bits accumulate its gradient in fp32, from before DDP wraps it."""
    if GRAD_DTYPE:
        parameter.grad_dtype = torch.float32


def set_gradient(parameter: nn.Parameter, gradient: Tensor | None) -> None:
    """Gives a parameter a gradient, which may be fp32 where the parameter is not."""
    if gradient is None or gradient.dtype is parameter.dtype or GRAD_DTYPE:
        parameter.grad = gradient
        return
    # An older torch compares types where a gradient is assigned, and not where it is added to.
    own = torch.empty((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
    parameter.grad = own
    own.data = gradient


class _Constant(torch.autograd.Function):
    """Passes ``total`` on, with a constant gradient for every element of a parameter; does not read the parameter."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, parameter: Tensor, value: float) -> Tensor:
        ctx.gradient = torch.full((), value, dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
        return total.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient, ctx.gradient, None


def _constant(parameters: Sequence[nn.Parameter], value: float) -> Tensor:
    """A zero, whose backward reaches the last parameter first, as a model's would."""
    total = torch.zeros((), device=parameters[0].device)
    with torch.enable_grad():
        for parameter in parameters:
            total = _Constant.apply(total, parameter, value)  # type: ignore[no-untyped-call]
    return total


@contextmanager
def _needing_gradients(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Within the block parameters that were frozen since the wrapping take gradients again, as DDP still expects."""
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


@contextmanager
def _hooks_aside(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Within the block users' hooks are not called: of a constant that no loss gave they might make something else."""
    found = [hooks for p in parameters for hooks in (p._backward_hooks, p._post_accumulate_grad_hooks) if hooks]
    held = [(hooks, dict(hooks)) for hooks in found]
    for hooks, _ in held:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, own in held:
            hooks.update(own)


def _other_torch(problem: str) -> ConfigError:
    return ConfigError(
        "torch", torch.__version__, f"its DistributedDataParallel {problem}", "Use a torch from 2.8 to 2.15"
    )
