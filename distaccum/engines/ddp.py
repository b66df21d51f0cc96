"""DistributedDataParallel: parameters replicated, gradients averaged in buckets, ``no_sync`` up to the boundary."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from distaccum.distributed.world import World
from distaccum.engines.base import NO_ARTIFACTS, EngineState, StateLayout, StepOutput
from distaccum.engines.comm_hooks import average_in_dtype
from distaccum.engines.dtensor import mebibytes
from distaccum.engines.fused_update import zero_in_place
from distaccum.engines.optimizer_step import OptimizerStep, trained
from distaccum.engines.unused_parameters import UnusedParameters
from distaccum.engines.zero1 import ZeRO1
from distaccum.errors import MisuseError
from distaccum.precision.autocast import apply_precision
from distaccum.precision.policy import FP32, PrecisionPolicy
from distaccum.precision.scaler import LossScaler

# DDP would send all buffers at every boundary; see sync_buffers. torch 2.13 gave the argument a new name.
_renamed = "forward_sync_buffers" in signature(DistributedDataParallel).parameters
_NO_BUFFER_SYNC: Any = {"forward_sync_buffers" if _renamed else "broadcast_buffers": False}


class DDPEngine:
    """Exact accumulation on torch's DDP, with gradients held once: in the buckets that are reduced.

    By default DDP keeps a gradient beside every bucket. Here gradients *are* views of the buckets from the first
    backward on, and are zeroed in place, so the window accumulates where the reduction reads.

    Args:
        model: moved to ``world.device``; every rank's copy is set to rank 0's.
        optimizer: over the model's parameters; or several, over disjoint sets of them.
        world: this rank.
        clip_norm: largest norm of the global gradient; None: no clipping by norm.
        clip_value: largest absolute value of its elements; None: no clipping by value.
        scaler: of the loss, where gradients pass through fp16.
        underflow_every: with a scaler, attempts between two samples of the share that is flushed to zero; 0: none.
        policy: what forwards compute in, and what gradients travel in between ranks.
        bucket_cap_mb: MiB of one reduction.
        find_unused_parameters: allow parameters that a window does not use; they are left out of its step.
        shards: which rank steps which parameters (ZeRO stage 1); None: each rank steps all.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        world: World,
        *,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        scaler: LossScaler | None = None,
        underflow_every: int = 0,
        policy: PrecisionPolicy = FP32,
        bucket_cap_mb: float = 25.0,
        find_unused_parameters: bool = False,
        shards: ZeRO1 | None = None,
    ) -> None:
        # With a scaler the average becomes a sum where it is unscaled, not in the loss: what fp16 can hold of a
        # gradient then does not depend on the world's size.
        self.device, self.gradient_divide_factor = world.device, 1 if scaler else world.size
        self.forward_communicates, self.artifacts = False, NO_ARTIFACTS
        self.state_layout, self.local_gradients = StateLayout.FULL if shards is None else StateLayout.SHARDED, None
        self._world, self._policy, self._shards = world, policy, shards
        self._sums_to = world.size if scaler else 1  # by what the reduced gradient is yet to be multiplied
        optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        apply_precision(model.to(world.device), policy, world.device, warn=world.is_main)
        if shards is not None:  # before DDP looks at how parameters lie
            shards.partition(optimizers)
        self._body = _Body(model)
        self._ddp = DistributedDataParallel(
            self._body,
            bucket_cap_mb=bucket_cap_mb,
            gradient_as_bucket_view=True,
            **_NO_BUFFER_SYNC,
            find_unused_parameters=find_unused_parameters,
        )
        if policy.reduce_dtype is not torch.float32:
            self._ddp.register_comm_hook(None, average_in_dtype(policy.reduce_dtype, world.size))
        self.sync_buffers()
        self._boundary = OptimizerStep(
            optimizers,
            trained(model),
            (model, self._body, self._ddp),
            clip_norm=clip_norm,
            clip_value=clip_value,
            scaler=scaler,
            underflow_every=underflow_every,
        )
        self.min_loss_scale, self._scale = self._boundary.min_loss_scale, scaler.scale if scaler else None
        self._parameters = list(self._boundary.parameters.values())
        self._use = UnusedParameters(self._parameters) if find_unused_parameters else None
        self._place_gradients_in_buckets()

    @property
    def model(self) -> nn.Module:
        """The DDP wrapper."""
        return self._ddp

    @property
    def unwrapped_model(self) -> nn.Module:
        """The model inside the wrapper."""
        return self._body.model

    def describe(self) -> str:
        """See :class:`Engine`."""
        elements = sum(p.numel() for p in self._parameters)
        sent = mebibytes(elements * self._policy.reduce_dtype.itemsize)
        line = f"parameters and gradients whole on every rank; {sent} of gradients all-reduced a window"
        if self._shards is None:
            return line
        return f"{line}; optimizer state on one rank each, {mebibytes(4 * elements)} of parameters broadcast a window"

    def sync_buffers(self) -> None:
        """One broadcast a buffer: done for evaluations, not for every window."""
        for buffer in self.unwrapped_model.buffers():
            self._world.broadcast_(buffer)

    def micro_step(self, *, sync: bool) -> AbstractContextManager[object]:
        """DDP's ``no_sync`` unless ``sync``; it must cover the forward, where DDP prepares the reduction."""
        self._body.called = False
        return nullcontext() if sync else self._ddp.no_sync()

    def autocast(self) -> AbstractContextManager[object]:
        """The policy's."""
        return self._policy.autocast(self.device)

    def backward(self, loss: Tensor) -> None:
        """Plain autograd, of the scaled loss in fp16: DDP reduces in its hooks."""
        if not self._body.called:
            problem = "the forward went past the engine, so gradients would not be reduced"
            raise MisuseError(f"{problem}: call acc.model (engine.model), not the model that was wrapped")
        (loss if self._scale is None else self._scale(loss)).backward()

    def begin_window(self, micro_steps: int) -> None:
        """Nothing: ranks may have different numbers of micro-steps."""

    def shadow_micro_step(self, *, sync: bool = True) -> None:
        """A backward from a zero that depends on every parameter: its hooks fire, the user's forward does not run."""
        if sync:
            with nullcontext() if self._use is None else self._use.ignoring():
                self._zero_backward()

    def set_lr_factor(self, factor: float) -> None:
        """Sets every group's ``lr`` to ``factor`` times its ``initial_lr``."""
        self._boundary.set_lr_factor(factor)

    def step(self, *, divisor: float = 1.0) -> StepOutput:
        """One transaction on the reduced gradients: every rank holds the same ones, bit by bit, so all decide alike."""
        among = None if self._use is None else self._use.masked(self._world)
        result = self._boundary.step(divisor / self._sums_to, among=among)
        if self._shards is not None:
            self._shards.broadcast()
        self.zero_gradients()
        return result

    def zero_gradients(self) -> None:
        """In place: the gradients stay views of the buckets."""
        zero_in_place(self._parameters)
        if self._use is not None:
            self._use.reset()

    def state(self) -> EngineState:
        """Each rank gives the model, and the optimizers' state as far as it holds it."""
        model: Any = get_model_state_dict(self.unwrapped_model)
        return self._boundary.state(model, owns=lambda _: True)

    def load_state(self, state: EngineState) -> None:
        """Raises RuntimeError, KeyError or ValueError, as torch does, where the state belongs to another model."""
        set_model_state_dict(self.unwrapped_model, dict(state.model))
        self._boundary.load_state(state)

    def save_files(self, folder: Path) -> None:
        """Nothing."""

    def load_files(self, folder: Path) -> None:
        """Nothing."""

    def _drop_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def _place_gradients_in_buckets(self) -> None:
        """Makes every gradient a view of its bucket before the first window, by a backward that adds nothing.

        DDP does so in its first synced backward, and rebuilds the buckets before its second. A window that first
        accumulates under ``no_sync`` would hold gradients and buckets, twice, until then. The user's forward does not
        run; the buckets keep the order that DDP assumes at first, the reverse of the parameters'.
        """

        for _ in range(2):
            self._drop_gradients()
            self._zero_backward()
        if self._use is not None:
            self._use.reset()

    def _zero_backward(self) -> None:
        self._body.zero = True
        try:
            self._ddp().backward()
        finally:
            self._body.zero = False


class _Body(nn.Module):
    """What DDP wraps: the user's model, or, when asked for, a zero that depends on every parameter."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.zero, self.called = model, False, False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.zero:
            self.called = True
            return self.model(*args, **kwargs)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        total = torch.zeros((), device=trained[0].device)
        for parameter in trained:
            total = total.to(parameter.device) + parameter.sum().float() * 0.0
        return total
