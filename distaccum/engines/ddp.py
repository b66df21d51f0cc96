"""DistributedDataParallel: parameters replicated, gradients averaged in buckets, ``no_sync`` up to the boundary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from distaccum.engines.base import EngineState, StepResult
from distaccum.engines.guard import StepGuard
from distaccum.engines.reduction import average_in
from distaccum.engines.update import Update, underflow_share, zero_in_place
from distaccum.engines.use import Use
from distaccum.errors import MisuseError
from distaccum.host_copy import HostCopy
from distaccum.precision.placement import place
from distaccum.precision.policy import FP32, PrecisionPolicy
from distaccum.precision.scaler import LossScaler
from distaccum.world import World

# DDP would send all buffers at every boundary; see sync_buffers. torch 2.13 gave the argument a new name.
_renamed = "forward_sync_buffers" in signature(DistributedDataParallel).parameters
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
_NO_BUFFER_SYNC: Any = {"forward_sync_buffers" if _renamed else "broadcast_buffers": False}


class DDPEngine:
    """Exact accumulation on torch's DDP, with gradients held once: in the buckets that are reduced.

    By default DDP keeps a gradient beside every bucket. Here gradients *are* views of the buckets from the first
    backward on, and are zeroed in place, so the window accumulates where the reduction reads.

    Args:
        model: on ``world.device`` already; every rank's copy is set to rank 0's.
        optimizer: over the model's parameters; or several, over disjoint sets of them.
        world: this rank.
        clip_norm: largest norm of the global gradient; None: no clipping by norm.
        clip_value: largest absolute value of its elements; None: no clipping by value.
        scaler: of the loss, where gradients pass through fp16.
        underflow_every: with a scaler, attempts between two samples of the share that is flushed to zero; 0: none.
        policy: what forwards compute in, and what gradients travel in between ranks.
        bucket_cap_mb: MiB of one reduction.
        find_unused_parameters: allow parameters that a window does not use; they are left out of its step.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], world: World, *,
        clip_norm: float | None = None, clip_value: float | None = None, scaler: LossScaler | None = None,
        underflow_every: int = 0, policy: PrecisionPolicy = FP32, bucket_cap_mb: float = 25.0,
        find_unused_parameters: bool = False,
    ) -> None:  # fmt: skip
        # With a scaler the average becomes a sum where it is unscaled, not in the loss: what fp16 can hold of a
        # gradient then does not depend on the world's size.
        self.device, self.averages_over = world.device, 1 if scaler else world.size
        self.min_loss_scale = scaler.min_scale if scaler and scaler.dynamic else None
        self._world, self._scaler, self._policy = world, scaler, policy
        self._underflow_every, self._attempts = underflow_every, 0
        self._optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._parameters = list(trained.values())
        self._update = Update(self._optimizers, trained, clip_norm=clip_norm, clip_value=clip_value)
        for group in self._groups():
            group.setdefault("initial_lr", group["lr"])
        place(model, policy, world.device, tell=world.is_main)
        self._body = _Body(model)
        self._ddp = DistributedDataParallel(
            self._body,
            bucket_cap_mb=bucket_cap_mb,
            gradient_as_bucket_view=True,
            **_NO_BUFFER_SYNC,
            find_unused_parameters=find_unused_parameters,
        )
        if policy.reduce_dtype is not torch.float32:
            self._ddp.register_comm_hook(None, average_in(policy.reduce_dtype, world.size))
        self.sync_buffers()
        self._guard = StepGuard(self._optimizers, (model, self._body, self._ddp))
        self._use = Use(self._parameters) if find_unused_parameters else None
        self._place_gradients_in_buckets()

    @property
    def model(self) -> nn.Module:
        """The DDP wrapper."""
        return self._ddp

    @property
    def bare_model(self) -> nn.Module:
        """The model inside the wrapper."""
        return self._body.model

    def sync_buffers(self) -> None:
        """One broadcast a buffer: done for evaluations, not for every window."""
        for buffer in self.bare_model.buffers():
            self._world.from_main_(buffer)

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
        scaled: Tensor = self._scaler.scale(loss) if self._scaler else loss
        scaled.backward()  # type: ignore[no-untyped-call]

    def stand_in(self) -> None:
        """A backward from a zero that depends on every parameter: its hooks fire, the user's forward does not run."""
        with nullcontext() if self._use is None else self._use.left_alone():
            self._zero_backward()

    def set_lr_factor(self, factor: float) -> None:
        """Sets every group's ``lr`` to ``factor`` times its ``initial_lr``."""
        for group in self._groups():
            group["lr"] = group["initial_lr"] * factor

    def _groups(self) -> Iterator[dict[str, Any]]:
        for optimizer in self._optimizers:
            yield from optimizer.param_groups

    def step(self, *, divisor: float = 1.0) -> StepResult:
        """One transaction on the reduced gradients: every rank holds the same ones, bit by bit, so all decide alike."""
        scale: float | Tensor | None = None if divisor == 1.0 else divisor
        if self._scaler:
            scale = self._scaler.current * (divisor / self._world.size)
        with self._guard, nullcontext() if self._use is None else self._use.only_used(self._world):
            found = self._update.step(scale)
        underflow = self._sample_underflow()
        self.zero_gradients()
        loss_scale = self._scaler.current if self._scaler else torch.ones_like(found.applied)
        told = HostCopy(torch.stack((found.applied, loss_scale.to(found.applied.dtype))))
        if self._scaler:
            self._scaler.advance(1.0 - found.applied)
        return StepResult(grad_norm=found.grad_norm, told=told, nonfinite=found.nonfinite, underflow=underflow)

    def _sample_underflow(self) -> Tensor | None:
        self._attempts += 1
        if not (self._scaler and self._underflow_every and self._attempts % self._underflow_every == 0):
            return None
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        return underflow_share(gradients) if gradients else None

    def zero_gradients(self) -> None:
        """In place: the gradients stay views of the buckets."""
        zero_in_place(self._parameters)
        if self._use is not None:
            self._use.reset()

    def state(self) -> EngineState:
        """The model's and the optimizer's state by parameter name; the same on every rank."""
        optimizer = self._optimizer_state()
        return EngineState(
            model=cast(dict[str, Tensor], get_model_state_dict(self.bare_model)),
            optimizer={name: value for name, value in optimizer.items() if isinstance(value, Tensor)},
            optimizer_values={name: value for name, value in optimizer.items() if not isinstance(value, Tensor)},
            scaler=self._scaler.state_dict() if self._scaler else {},
        )

    def load_state(self, state: EngineState) -> None:
        """Raises RuntimeError, KeyError or ValueError, as torch does, where the state belongs to another model."""
        self._drop_gradients()  # torch leaves an optimizer's state out, silently, where gradients are there already
        set_model_state_dict(self.bare_model, dict(state.model))
        settings = [dict(group) for group in self._groups()]
        fresh = self._optimizer_state()  # stands in where the saved run had never used a parameter
        # The groups' settings are this run's: torch reads there on which device a fused kernel wants its state.
        kept = {**state.optimizer, **state.optimizer_values}.items()
        saved = cast(Any, {**fresh, **{name: value for name, value in kept if not name.startswith("param_groups.")}})
        with self._guard:  # torch makes the state to fill by a step without a rate
            set_optimizer_state_dict(self.bare_model, self._optimizers, saved, options=_FLAT)
        self._forget_unused(state.optimizer)
        for group, setting in zip(self._groups(), settings, strict=True):
            group.update(setting)  # the rate, decay and so on are this run's, not the saved one's
        self._update.forget()
        if self._scaler and state.scaler:
            self._scaler.load_state_dict(dict(state.scaler))
        self._place_gradients_in_buckets()

    def _optimizer_state(self) -> dict[str, Any]:
        with self._guard:
            return get_optimizer_state_dict(self.bare_model, self._optimizers, options=_FLAT)

    def _forget_unused(self, saved: Mapping[str, Tensor]) -> None:
        for name, parameter in self.bare_model.named_parameters():
            if not any(key.startswith(f"state.{name}.") for key in saved):
                for optimizer in self._optimizers:
                    optimizer.state.pop(parameter, None)

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
