"""Memory that a micro-step takes beside weights and gradients: found by running it on tensors that have none.

The forward, the loss and the backward of one micro-batch run under torch's ``FakeTensorMode``: every operator tells the
shapes of what it would make, on the device that is asked for, whether there is one or not. Nothing is computed, so a
model of any size takes seconds. What is counted is the memory of tensors from the operator that makes it to the moment
when nobody refers to it any more, each storage once: what autograd saves for the backward, the logits and their
gradient, casts of weights under autocast, and the gradient of a parameter before it is added to the window's.

Not seen is what a kernel takes for itself while it runs: workspaces of cuBLAS and cuDNN, and sums in the backward of a
fused attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch._subclasses import fake_tensor
from torch.utils._pytree import tree_map_only

from distaccum.data.batches import map_tensors, moved_object
from distaccum.losses.base import Loss
from distaccum.losses.normalize import as_loss_sums
from distaccum.precision.autocast import apply_precision
from distaccum.precision.policy import PrecisionPolicy
from distaccum.tools.memory import LiveMemory


@dataclass(frozen=True, kw_only=True)
class Activations:
    """Bytes of a micro-step beside weights, gradients and the micro-batch: ``kept`` after the forward, and the most."""

    kept: int
    peak: int


class CannotTellError(Exception):
    """A model, a loss or a micro-batch that cannot be run without numbers; says why, in one line."""


# What a tensor without numbers cannot do; anything else that is raised is the model's own.
_OF_FAKE_TENSORS = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.FakeTensorDeviceMismatchError,
    fake_tensor.UnsupportedFakeTensorException,
    fake_tensor.UnsupportedOperatorException,
    NotImplementedError,
)
_WORDS = (
    "FakeTensor",
    "fake tensor",
    "meta tensor",
    "Meta tensor",
    "GuardOnDataDependent",
    "data_ptr",
    "data pointer",
    "Pointer argument",
    "tensor subclasses",
)


def measure(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    *,
    device: str,
    policy: PrecisionPolicy,
    casts: bool = True,
    weights: torch.dtype | None = None,
    prepare: Callable[[nn.Module], object] | None = None,
) -> Activations:
    """The memory that a forward and backward of ``batch`` takes on a rank that has a gradient of each weight already.

    Neither model, loss nor batch change, and nothing is taken from a device.

    Args:
        model: on any device, ``meta`` too; it is run in training mode.
        loss: sums over a batch.
        batch: on the host; its shapes alone are used.
        device: the kind that is to be planned for, ``cuda`` or ``cpu``; this machine need not have it.
        policy: what the forward computes in.
        casts: whether by autocast; else buffers and floating-point inputs are cast to ``weights`` too.
        weights: what parameters are computed from, where that is not their own type: their gradients, of this type, are
            then added to others and freed.
        prepare: does to a model what an engine would, as to recompute parts of it in the backward.

    Raises:
        CannotTellError: something in it asks for numbers, or torch does not know the shapes that an operator makes.
    """
    place, live = torch.device(device), LiveMemory(device)
    try:
        with (
            functorch_config.patch(fake_tensor_allow_unsafe_data_ptr_access=False),  # else it warns once in a process
            fake_tensor.FakeTensorMode(allow_non_fake_inputs=True),
            torch.compiler.set_stance("force_eager"),
        ):
            try:
                copy, its_loss = _without_numbers(model, loss, place, weights, buffers=not casts)
            except Exception as error:  # whatever a model raises that cannot be copied
                raise CannotTellError(f"it cannot be copied ({_first_line(error)})") from error
            copy.train()
            if weights is not None and not casts:
                copy.register_forward_pre_hook(partial(_cast_inputs, weights), with_kwargs=True)
            if prepare is not None:
                prepare(copy)
            apply_precision(copy, policy, place, warn=False)
            there = map_tensors(batch, partial(_empty, device=place), lambda value: moved_object(value, place))
            for parameter in copy.parameters():
                if parameter.requires_grad and weights is None:
                    parameter.grad = torch.empty_like(parameter)
                elif parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(_drop_gradient)  # type: ignore[no-untyped-call]
            with live, torch.autograd.set_multithreading_enabled(False):
                with _autocast(policy, device) if casts and policy.casts else nullcontext():
                    total = sum(as_loss_sums(its_loss(copy, there)).values())
                kept = live.now
                assert isinstance(total, Tensor)
                torch.autograd.backward(total)
    except CannotTellError:
        raise
    except Exception as error:
        if isinstance(error, _OF_FAKE_TENSORS) or any(word in str(error) for word in _WORDS):
            raise CannotTellError(_first_line(error)) from error
        raise
    return Activations(kept=kept, peak=live.peak)


@contextmanager
def _autocast(policy: PrecisionPolicy, kind: str) -> Iterator[None]:
    """``policy.autocast``, also for a GPU on a machine without one, where torch would switch it off."""
    before = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    torch.set_autocast_enabled(kind, not policy.only)
    torch.set_autocast_dtype(kind, policy.compute_dtype)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled(kind, before[0])
        torch.set_autocast_dtype(kind, before[1])


def _without_numbers(
    model: nn.Module, loss: Loss, device: torch.device, weights: torch.dtype | None, *, buffers: bool
) -> tuple[nn.Module, Loss]:
    """Copies whose tensors lie on ``device`` and hold nothing; tied ones stay tied."""
    memo: dict[int, Any] = {}
    if buffers:
        memo |= {id(tensor): _empty(tensor, device, weights) for tensor in model.buffers()}
    for thing in (*model.modules(), *(loss.modules() if isinstance(loss, nn.Module) else [loss])):
        own = (*thing.parameters(recurse=False), *thing.buffers(recurse=False)) if isinstance(thing, nn.Module) else ()
        for tensor in (*own, *getattr(thing, "__dict__", {}).values()):
            if isinstance(tensor, Tensor) and id(tensor) not in memo:
                memo[id(tensor)] = _empty(tensor, device, weights if isinstance(tensor, nn.Parameter) else None)
    return deepcopy((model, loss), memo)


def _empty(tensor: Tensor, device: torch.device, weights: torch.dtype | None = None) -> Tensor:
    dtype = weights if weights is not None and tensor.is_floating_point() else tensor.dtype
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=device)
    return nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _cast_inputs(dtype: torch.dtype, _: nn.Module, args: Any, kwargs: Any) -> Any:
    return tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, (args, kwargs))


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
