"""The loss scaler of fp16: torch's, mended, and one decision for all ranks, shards and optimizers."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import Optimizer

# Updates in a row, counted from -1 after an overflow: there DeepSpeed waits for one more than between two growths.
_AFTER_OVERFLOW = -1


class LossScaler(ShardedGradScaler):
    """A drop-in for torch's ``GradScaler`` and ``ShardedGradScaler``, on CPU and CUDA, with the same state dict.

    What it does otherwise:

    - The decision to skip is taken once for all ranks and optimizers: by the maximum, as exactly 0.0 or 1.0, in a
      0-dim tensor. Torch's sharded one has shape ``(1,)``, which fused optimizers refuse (pytorch#140514); is a sum,
      which they take for "finite" where it is 2; and without ``unscale_`` is each rank's own.
    - The scale stays within bounds: torch's falls to 0, from where the next gradients are NaN without being found so,
      and on the CPU grows to infinity.
    - A 16-bit loss is scaled in fp32; torch's sharded one rounds it back, to infinity above 65504. (Its own backward
      still casts the scale to 16 bits: sum losses in fp32.)
    - Its device is asked for: torch's is ``cuda`` by default, and switches itself off where there is none.

    An overflow and a row of updates move the scale as they do in DeepSpeed's ``DynamicLossScaler`` with
    ``hysteresis`` (its ``delayed_shift``) and ``consecutive_hysteresis``. Everything stays on the device.

    Args:
        device: of the scale, and of most gradients.
        init_scale: of the first window.
        growth_factor: multiplies it after ``growth_interval`` updates in a row; after an overflow or at the start,
            after one more.
        backoff_factor: multiplies it at an overflow.
        growth_interval: see ``growth_factor``.
        hysteresis: overflows until it shrinks; counted anew after a growth.
        consecutive_hysteresis: count them anew after every update as well.
        min_scale: it never falls below.
        max_scale: it never rises above.
        dynamic: False for a constant scale.
        group: the ranks that decide together; None for all.
    """

    def __init__(
        self,
        device: torch.device | str,
        *,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        hysteresis: int = 1,
        consecutive_hysteresis: bool = False,
        min_scale: float = 1.0,
        max_scale: float = 2.0**24,
        dynamic: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(
            torch.device(device).type,
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            process_group=group,
        )
        lowest, highest = (min_scale, max_scale) if dynamic else (init_scale, init_scale)
        # As fp32 has them, for the scale is compared with them.
        self.min_scale, self.max_scale = torch.tensor([lowest, highest], dtype=torch.float32).tolist()
        self.dynamic = dynamic
        self._hysteresis, self._consecutive = hysteresis, consecutive_hysteresis
        options: Any = {"device": device}
        self._now = torch.full((), init_scale, dtype=torch.float32, **options)
        self._streak = torch.full((), _AFTER_OVERFLOW, dtype=torch.int32, **options)
        self._left = torch.full((), hysteresis, dtype=torch.int32, **options)
        self._scale, self._growth_tracker = self._now, self._streak  # where torch's own methods look for them

    @property
    def current(self) -> Tensor:
        """The scale: 0-dim fp32, changed in place by :meth:`advance`."""
        return self._now

    def scale(self, outputs: Any) -> Any:
        """A loss (or an iterable of them) times the scale; 16-bit ones become fp32."""
        if isinstance(outputs, Tensor):
            wide = outputs.float() if outputs.dtype in (torch.float16, torch.bfloat16) else outputs
            return wide * self._now.to(outputs.device, non_blocking=True)
        scaled = map(self.scale, outputs)
        return type(outputs)(scaled) if isinstance(outputs, list | tuple) else scaled

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divides the optimizer's gradients by the scale, and finds whether any is not finite on any rank.

        Raises:
            RuntimeError: called twice, or after :meth:`step`, within one :meth:`update`.
        """
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is not OptState.READY:
            raise RuntimeError("unscale_() was called already, or step() was, since the last update()")
        inverse = self._now.double().reciprocal().float()  # fp64, as torch does it
        found = self._unscale_grads_(optimizer, inverse, torch.zeros_like(self._now), allow_fp16=True)
        state["found_inf_per_device"] = {self._now.device: self._agree(list(found.values()))}
        state["stage"] = OptState.UNSCALED

    def _agree(self, found: list[Tensor]) -> Tensor:
        """1.0 if any device of any rank found something; 0-dim, where the scale lies."""
        anywhere = torch.stack([one.to(self._now.device) for one in found]).amax()
        if dist.is_initialized():
            dist.all_reduce(anywhere, op=dist.ReduceOp.MAX, group=self.process_group)
        return anywhere

    def step(self, *optimizers: Optimizer) -> None:
        """Steps all of them or none: none if a gradient of any optimizer that was unscaled is not finite on any rank.

        One call for all optimizers is one transaction; of several calls the first cannot know of the gradients that
        only the next one unscales: call :meth:`unscale_` for each before.

        Raises:
            RuntimeError: one of them has stepped since the last :meth:`update`.
        """
        states = [self._per_optimizer_states[id(optimizer)] for optimizer in optimizers]
        for optimizer, state in zip(optimizers, states, strict=True):
            if state["stage"] is OptState.STEPPED:
                raise RuntimeError("step() has been called since the last update()")
            if state["stage"] is OptState.READY:
                self.unscale_(optimizer)
        found = self._found()
        # A fused optimizer's first step makes state that it would leave unset if it were told not to step.
        on_host = not all(getattr(o, "_step_supports_amp_scaling", False) and o.state for o in optimizers)
        if not (on_host and found.item()):  # host read: an unfused step can only be left out by the host
            for optimizer in optimizers:
                _step(optimizer, found)
        for state in states:
            state["stage"] = OptState.STEPPED

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Once a window, after all steps: moves the scale, or sets it to ``new_scale``.

        Raises:
            AssertionError: no gradient was looked at since the last call.
        """
        if new_scale is not None:
            self._now.fill_(new_scale).clamp_(self.min_scale, self.max_scale)
        else:
            self.advance(self._found())
        self._per_optimizer_states.clear()

    def _found(self) -> Tensor:
        found = [one for state in self._per_optimizer_states.values() for one in state["found_inf_per_device"].values()]
        assert found, "no gradient was unscaled since the last update()"
        return torch.stack(found).amax()

    def advance(self, found_inf: Tensor) -> None:
        """Moves the scale by one window's decision: 0-dim, 1.0 for an overflow, else 0.0. Reads nothing back."""
        if not self.dynamic:
            return
        overflowed = found_inf > 0
        streak = (self._streak + 1).masked_fill_(overflowed, _AFTER_OVERFLOW)
        grows, shrinks = streak >= self._growth_interval, overflowed & (self._left <= 1)
        factor = torch.ones_like(self._now).masked_fill_(grows, self._growth_factor)
        factor.masked_fill_(shrinks, self._backoff_factor)
        self._now.mul_(factor).clamp_(self.min_scale, self.max_scale)
        self._streak.copy_(streak.masked_fill_(grows, 0))
        if self._hysteresis > 1:
            refilled = grows | ~overflowed if self._consecutive else grows
            self._left.sub_(overflowed.int()).clamp_(min=1).masked_fill_(refilled, self._hysteresis)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._scale, self._growth_tracker = self._now, self._streak  # a copy's own

    def state_dict(self) -> dict[str, Any]:
        """Torch's five entries, and ``_hysteresis``; plain numbers, read from the device."""
        return {**super().state_dict(), "_hysteresis": int(self._left)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes up scale, row and hysteresis of :meth:`state_dict`, or of torch's; the settings stay its own."""
        if self.dynamic:
            self._now.fill_(state_dict["scale"]).clamp_(self.min_scale, self.max_scale)
            self._streak.fill_(state_dict["_growth_tracker"])
            self._left.fill_(min(state_dict.get("_hysteresis", self._hysteresis), self._hysteresis))


def _step(optimizer: Any, found_inf: Tensor) -> None:
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        optimizer.step()
        return
    optimizer.grad_scale, optimizer.found_inf = None, found_inf
    optimizer.step()
    del optimizer.grad_scale, optimizer.found_inf
