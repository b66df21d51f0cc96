"""DistributedDataParallel: parameters replicated, gradients averaged in buckets, ``no_sync`` up to the boundary."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from distaccum.config.engine import DDPConfig, Zero1Config
from distaccum.distributed.world import World
from distaccum.engines.base import Engine, EngineState, StateLayout, StepOutput, forward_past_engine, mebibytes
from distaccum.engines.comm_hooks import average_in_dtype
from distaccum.engines.context import EngineContext
from distaccum.engines.fused_update import StepOptions, zero_in_place
from distaccum.engines.modules import trained
from distaccum.engines.optimizer_step import OptimizerStep
from distaccum.engines.state import load_model_state, model_state
from distaccum.engines.unused_parameters import UnusedParameters
from distaccum.engines.zero1 import ZeRO1
from distaccum.precision.autocast import apply_precision
from distaccum.precision.policy import PrecisionPolicy

# DDP would send all buffers at every boundary; see sync_buffers. torch 2.13 gave the argument a new name.
_renamed = "forward_sync_buffers" in signature(DistributedDataParallel).parameters
_NO_BUFFER_SYNC: Any = {"forward_sync_buffers" if _renamed else "broadcast_buffers": False}


class DDPEngine(Engine):
    """Exact accumulation on torch's DDP, with gradients held once: in the buckets that are reduced.

    By default DDP keeps gradients and buckets. Here gradients *are* views of the buckets from the first
    backward on, and are zeroed in place, so the window accumulates where the reduction reads.

    Args:
        model: moved to ``world.device``; every rank's copy is set to rank 0's.
        optimizers: over disjoint sets of the model's parameters.
        world: this rank.
        config: bucket size, and whether a window may leave parameters unused.
        policy: what forwards compute in, and what gradients travel in between ranks.
        options: clipping and the loss scale.
        shards: which rank steps which parameters (ZeRO stage 1); None: each rank steps all.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        world: World,
        *,
        config: DDPConfig,
        policy: PrecisionPolicy,
        options: StepOptions,
        shards: ZeRO1 | None = None,
    ) -> None:
        super().__init__(optimizers, world, policy, options.scaler)
        # With a scaler the average becomes a sum where it is unscaled, not in the loss: what fp16 can hold of a
        # gradient then does not depend on the world's size.
        self.gradient_divide_factor = 1 if options.scaler else world.size
        self._sums_to = world.size if options.scaler else 1  # a factor that the reduced gradient is still to get
        self._shards = shards
        apply_precision(model.to(world.device), policy, world.device, warn=world.is_main)
        if shards is not None:  # before DDP looks at how parameters lie
            self.state_layout = StateLayout.SHARDED
            shards.partition(optimizers)
        self._body = _Body(model)
        # DDP would broadcast them, and gloo does not know all of their types; sync_buffers below does.
        buffers = [f"model.{name}" for name, _ in model.named_buffers(remove_duplicate=False)]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self._body, buffers)
        self._ddp = DistributedDataParallel(
            self._body,
            bucket_cap_mb=config.bucket_cap_mb,
            gradient_as_bucket_view=True,
            **_NO_BUFFER_SYNC,
            find_unused_parameters=config.find_unused_parameters,
        )
        if policy.reduce_dtype is not torch.float32:
            self._ddp.register_comm_hook(None, average_in_dtype(policy.reduce_dtype, world.size))
        self.sync_buffers()
        parameters = trained(model)
        self._optimizer_step = OptimizerStep(optimizers, parameters, (model, self._body, self._ddp), options)
        self._parameters = list(parameters.values())
        self._unused = UnusedParameters(self._parameters) if config.find_unused_parameters else None
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

    def micro_step(self, *, sync: bool) -> AbstractContextManager[object]:
        """DDP's ``no_sync`` unless ``sync``; it must cover the forward, where DDP prepares the reduction."""
        self._body.called = False
        return nullcontext() if sync else self._ddp.no_sync()

    def backward(self, loss: Tensor) -> None:
        """Plain autograd, of the scaled loss in fp16: DDP reduces in its hooks."""
        if not self._body.called:
            raise forward_past_engine()
        (loss if self._scaler is None else self._scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]

    def shadow_micro_step(self, *, sync: bool = True) -> None:
        """A backward from a zero that depends on every parameter: its hooks fire, the user's forward does not run."""
        if sync:
            with nullcontext() if self._unused is None else self._unused.ignoring():
                self._zero_backward()

    def step(self, *, divisor: float = 1.0) -> StepOutput:
        """Steps on the reduced gradients: every rank holds the same ones, bit by bit, so all take one decision."""
        among = None if self._unused is None else self._unused.masked(self._world)
        output = self._optimizer_step.step(divisor / self._sums_to, among=among)
        if self._shards is not None:
            self._shards.broadcast()
        self.zero_gradients()
        return output

    def zero_gradients(self) -> None:
        """In place: the gradients stay views of the buckets."""
        zero_in_place(self._parameters)
        if self._unused is not None:
            self._unused.reset()

    def state(self) -> EngineState:
        """Each rank gives the model, and the optimizer state that it holds."""
        return self._optimizer_step.state(model_state(self.unwrapped_model), owns=lambda _: True)

    def load_state(self, state: EngineState) -> None:
        """See :class:`Engine`."""
        load_model_state(self.unwrapped_model, state.model)
        self._optimizer_step.load_state(state)

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
        if self._unused is not None:
            self._unused.reset()

    def _zero_backward(self) -> None:
        self._body.zero = True
        try:
            self._ddp().backward()
        finally:
            self._body.zero = False


def create(model: nn.Module, optimizers: Sequence[Optimizer], world: World, context: EngineContext) -> DDPEngine:
    """For ``engine=ddp``; see ``factory.EngineSpec``."""
    assert isinstance(context.engine, DDPConfig)
    options = context.step_options(world.device)
    return DDPEngine(model, optimizers, world, config=context.engine, policy=context.policy, options=options)


def create_zero1(model: nn.Module, optimizers: Sequence[Optimizer], world: World, context: EngineContext) -> DDPEngine:
    """For ``engine=zero1``."""
    assert isinstance(context.engine, Zero1Config)
    options = context.step_options(world.device)
    return DDPEngine(
        model,
        optimizers,
        world,
        config=context.engine,
        policy=context.policy,
        options=options,
        shards=ZeRO1(world),
    )


class _Body(nn.Module):
    """What DDP wraps: the user's model, or, when asked for, a zero that depends on every parameter."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.zero = False
        self.called = False  # since the last micro-step began

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.zero:
            self.called = True
            return self.model(*args, **kwargs)
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        total = torch.zeros((), device=parameters[0].device)
        for parameter in parameters:
            total = total.to(parameter.device) + parameter.sum().float() * 0.0
        return total
