"""DeepSpeed's reduced gradient: where each of its optimizer wrappers holds it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

Named = tuple[str, Tensor]


class Gradients(Protocol):
    """A rank's part of the reduced gradient."""

    sharded: bool
    """Whether each rank holds a part of it; otherwise all hold the same."""

    def held(self) -> Iterator[Named]:
        """Pairs of a parameter's name and this rank's part of its gradient."""

    def divide(self, divisor: float) -> None:
        """Makes the next step use the gradient over ``divisor``; once a window."""

    def drop(self) -> None:
        """Drops what was accumulated and reduced."""


class Replicated:
    """Stage 0: in the parameters' ``grad``, with or without a wrapper that holds fp32 weights."""

    sharded = False

    def __init__(self, engine: Any, trained: Mapping[str, nn.Parameter]) -> None:
        self._engine = engine
        self._trained = trained

    def held(self) -> Iterator[Named]:
        """Whole gradients."""
        yield from ((name, p.grad) for name, p in self._trained.items() if p.grad is not None)

    def divide(self, divisor: float) -> None:
        """Divides in place."""
        _divide([gradient for _, gradient in self.held()], divisor)

    def drop(self) -> None:
        """Frees them; the next backward makes new ones."""
        for parameter in self._trained.values():
            parameter.grad = None


class MasterCopies:
    """Stage 1 in bf16: whole fp32 gradients in buffers of the wrapper; each rank steps a part."""

    sharded = False

    def __init__(self, engine: Any) -> None:
        self._optimizer = engine.optimizer

    def held(self) -> Iterator[Named]:
        """Whole gradients."""
        names = self._optimizer.param_names
        for group, gradients in zip(self._optimizer.bf16_groups, self._optimizer.fp32_groups_gradients, strict=True):
            yield from ((names[p], gradient) for p, gradient in zip(group, gradients, strict=True))

    def divide(self, divisor: float) -> None:
        """Divides in place."""
        _divide(self._optimizer.fp32_groups_gradients_flat, divisor)

    def drop(self) -> None:
        """Zeroes in place."""
        self._optimizer.clear_hp_grads()
        self._optimizer.clear_lp_grads()


class _Sharded:
    sharded = True

    def __init__(self, engine: Any) -> None:
        self._optimizer = engine.optimizer
        self.divide(1.0)

    def divide(self, divisor: float) -> None:
        """Sets the loss scale that DeepSpeed divides by: no walk over memory, and its clipping sees it."""
        self._optimizer.override_loss_scale(divisor)


class Partitions(_Sharded):
    """Stages 1 and 2: this rank's slice of all parameters end to end."""

    def held(self) -> Iterator[Named]:
        """This rank's slices, without padding."""
        optimizer = self._optimizer
        for i, parameters in enumerate(optimizer.params_in_partition):
            if optimizer.cpu_offload:
                flat = optimizer.single_partition_of_fp32_groups[i].grad
                places = (optimizer.grad_position[optimizer.get_param_id(p)] for p in parameters)
                pieces: Sequence[Tensor] = [flat.narrow(0, int(start), int(n)) for _, _, start, n in places]
            else:
                pieces = [g for g in optimizer.averaged_gradients[i] if not getattr(g, "_zero_padding", False)]
            yield from ((optimizer.param_names[p], piece) for p, piece in zip(parameters, pieces, strict=False))

    def drop(self) -> None:
        """Drops them as DeepSpeed does at an overflow."""
        optimizer = self._optimizer
        optimizer.zero_grad(set_to_none=True)
        optimizer.micro_step_id = -1
        for held in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
            held.update(dict.fromkeys(held))
        if optimizer.cpu_offload:
            optimizer.reset_cpu_buffers()
            optimizer._offload_accumulated_param_ids = set()


class ParameterShards(_Sharded):
    """Stage 3: this rank's slice of each parameter."""

    def held(self) -> Iterator[Named]:
        """This rank's slices."""
        optimizer = self._optimizer
        for i, parameters in enumerate(optimizer.fp16_groups):
            if optimizer.offload_optimizer:
                flat = optimizer.fp32_partitioned_groups_flat[i].grad
                places = (optimizer.grad_position[optimizer.get_param_id(p)] for p in parameters)
                pieces: Sequence[Tensor] = [flat.narrow(0, int(start), int(n)) for _, start, n in places]
            else:
                pieces = optimizer.averaged_gradients[i]
            yield from ((optimizer.param_names[p], piece) for p, piece in zip(parameters, pieces, strict=True))

    def drop(self) -> None:
        """Drops them as DeepSpeed does at an overflow."""
        optimizer = self._optimizer
        optimizer.zero_grad(set_to_none=True)
        if optimizer.offload_optimizer:
            optimizer.reset_cpu_buffers()
        else:
            optimizer.averaged_gradients = {}
        # Otherwise a parameter that a window does not use keeps its gradient of the window before.
        optimizer.grad_partitions_flat_buffer.zero_()


def gradients_of(engine: Any, trained: Mapping[str, nn.Parameter]) -> Gradients:
    """The gradients of the wrapper that DeepSpeed chose for a stage and a precision."""
    optimizer, stage = engine.optimizer, engine.zero_optimization_stage()
    if hasattr(optimizer, "fp32_groups_gradients_flat"):
        return MasterCopies(engine)
    if stage == 0:
        return Replicated(engine, trained)
    return ParameterShards(engine) if hasattr(optimizer, "fp16_groups") else Partitions(engine)


def complete(optimizer: Any, trained: Sequence[nn.Parameter]) -> None:
    """Gives zeros to parameters without a gradient on this rank.

    Other ranks may have used them, and reductions must match. At stage 3 DeepSpeed would otherwise step on what was
    left of the window before, and in bf16 at stage 1 leave what this rank did not use out of its norm.
    """
    for used in getattr(optimizer, "fp32_groups_has_gradients", ()):
        used[:] = [True] * len(used)
    if hasattr(optimizer, "fp32_groups_has_gradients"):
        return
    has_own_attribute = getattr(optimizer, "use_grad_accum_attribute", False)
    for parameter in trained:
        if has_own_attribute:
            if getattr(parameter, "grad_accum", None) is None:
                zeros = torch.zeros_like(parameter, dtype=optimizer.gradient_accumulation_dtype)
                parameter.grad_accum = zeros  # type: ignore[attr-defined]  # DeepSpeed's
        elif parameter.grad is None:
            gradient = torch.zeros_like(parameter, dtype=accumulated_in(parameter))
            parameter.grad = gradient
            shape = getattr(parameter, "ds_shape", None)
            if shape is not None:  # its own memory was given back, and with it its shape
                parameter.grad.data = gradient.new_zeros(shape)


def accumulate_in_fp32(parameter: nn.Parameter) -> None:
    """Makes autograd accumulate a 16-bit parameter's gradients in fp32, where torch can (2.10 and later)."""
    if hasattr(parameter, "grad_dtype"):
        parameter.grad_dtype = torch.float32


def accumulated_in(parameter: nn.Parameter) -> torch.dtype:
    """The format in which autograd accumulates the parameter's gradients."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


def _divide(gradients: Sequence[Tensor], divisor: float) -> None:
    if divisor != 1.0 and gradients:
        torch._foreach_div_(list(gradients), divisor)
