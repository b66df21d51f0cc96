"""A drop-in for torch's loss scalers in a hand-written loop. The engines use ``LossScale`` alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import Optimizer

from distaccum.config.precision import ScalerConfig
from distaccum.precision.loss_scale import LossScale

_DEFAULT = ScalerConfig()


class LossScaler(ShardedGradScaler):
    """A drop-in for torch's ``GradScaler`` and ``ShardedGradScaler``, on CPU and CUDA, with the same state dict.

    What it does otherwise:

    - The decision to skip is taken once for all ranks and optimizers: by the maximum, as exactly 0.0 or 1.0, in a
      0-dim tensor. Torch's sharded one has shape ``(1,)``, which fused optimizers refuse (pytorch#140514); is a sum,
      which they take for "finite" where it is 2; and without ``unscale_`` is each rank's own.
    - The scale stays within bounds, and moves as ``LossScale`` says.
    - A 16-bit loss is scaled in fp32; torch's sharded one rounds it back, to infinity above 65504. (Its own backward
      still casts the scale to 16 bits: sum losses in fp32.)
    - Its device is asked for: torch's is ``cuda`` by default, and switches itself off where there is none.

    Args:
        device, init_scale, growth_factor, backoff_factor, growth_interval: see ``LossScale``.
        hysteresis, consecutive_hysteresis, min_scale, max_scale, dynamic: see ``LossScale``.
        group: the ranks that decide together; None for all.
    """

    def __init__(
        self,
        device: torch.device | str,
        *,
        init_scale: float = _DEFAULT.initial_scale,
        growth_factor: float = _DEFAULT.growth_factor,
        backoff_factor: float = _DEFAULT.backoff_factor,
        growth_interval: int = _DEFAULT.growth_interval,
        hysteresis: int = _DEFAULT.hysteresis,
        consecutive_hysteresis: bool = _DEFAULT.consecutive_hysteresis,
        min_scale: float = _DEFAULT.min_scale,
        max_scale: float = _DEFAULT.max_scale,
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
        self._loss_scale = LossScale(
            device,
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            hysteresis=hysteresis,
            consecutive_hysteresis=consecutive_hysteresis,
            min_scale=min_scale,
            max_scale=max_scale,
            dynamic=dynamic,
        )
        self._share_tensors()

    def _share_tensors(self) -> None:
        """Torch's own methods look for the scale and the row of updates in these attributes."""
        self._scale = self._loss_scale.current
        self._growth_tracker = self._loss_scale.streak

    @property
    def current(self) -> Tensor:
        """The scale: 0-dim fp32, changed in place by :meth:`update`."""
        return self._loss_scale.current

    def scale(self, outputs: Any) -> Any:
        """A loss (or an iterable of them) times the scale; 16-bit ones become fp32."""
        if isinstance(outputs, Tensor):
            return self._loss_scale.scale(outputs)
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
        inverse = self.current.double().reciprocal().float()  # fp64, as torch does it
        found = self._unscale_grads_(optimizer, inverse, torch.zeros_like(self.current), allow_fp16=True)
        state["found_inf_per_device"] = {self.current.device: self._agree(list(found.values()))}
        state["stage"] = OptState.UNSCALED

    def _agree(self, found: list[Tensor]) -> Tensor:
        """1.0 if any device of any rank found something; 0-dim, where the scale lies."""
        anywhere = torch.stack([one.to(self.current.device) for one in found]).amax()
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
        # A fused optimizer's first step makes state that the kernel leaves unset where ``found_inf`` is 1.
        on_host = not all(getattr(o, "_step_supports_amp_scaling", False) and o.state for o in optimizers)
        if not (on_host and found.item()):  # host read: an unfused step can only be left out by the host
            for optimizer in optimizers:
                _step(optimizer, found)
        for state in states:
            state["stage"] = OptState.STEPPED

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Once a window, after all steps: moves the scale, or sets it to ``new_scale``.

        Raises:
            AssertionError: no gradient was unscaled since the last call.
        """
        if new_scale is not None:
            self._loss_scale.set(new_scale)
        else:
            self.advance(self._found())
        self._per_optimizer_states.clear()

    def _found(self) -> Tensor:
        found = [one for state in self._per_optimizer_states.values() for one in state["found_inf_per_device"].values()]
        assert found, "no gradient was unscaled since the last update()"
        return torch.stack(found).amax()

    def advance(self, found_inf: Tensor) -> None:
        """Moves the scale by one window's decision, for a loop that takes it itself; see ``LossScale.advance``."""
        self._loss_scale.advance(found_inf)

    def set_growth_factor(self, new_factor: float) -> None:
        """Torch's setter, for the rule too."""
        super().set_growth_factor(new_factor)
        self._loss_scale.growth_factor = new_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        """Torch's setter, for the rule too."""
        super().set_backoff_factor(new_factor)
        self._loss_scale.backoff_factor = new_factor

    def set_growth_interval(self, new_interval: int) -> None:
        """Torch's setter, for the rule too."""
        super().set_growth_interval(new_interval)
        self._loss_scale.growth_interval = new_interval

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share_tensors()  # a copy's own

    def state_dict(self) -> dict[str, Any]:
        """Torch's five entries, and ``_hysteresis``; plain numbers, read from the device."""
        return self._loss_scale.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores scale, row and hysteresis of :meth:`state_dict`, or of torch's; the settings stay its own."""
        self._loss_scale.load_state_dict(state_dict)


def _step(optimizer: Any, found_inf: Tensor) -> None:
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        optimizer.step()
        return
    optimizer.grad_scale, optimizer.found_inf = None, found_inf
    optimizer.step()
    del optimizer.grad_scale, optimizer.found_inf
