"""A drop-in for torch's loss scalers in a hand-written loop. The engines use ``LossScale`` alone."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import Optimizer

from distaccum.config.precision import ScalerConfig
from distaccum.errors import ConfigError
from distaccum.precision.loss_scale import LossScale

_DEFAULT = ScalerConfig()
_PASSES_ITSELF = (
    "the scaler is going to stop passing itself to an optimizer's step as grad_scaler: read the attributes grad_scale "
    "and found_inf instead, which are set on an optimizer whose step has no such argument"
)


class LossScaler(ShardedGradScaler):
    """A drop-in for torch's ``GradScaler`` and ``ShardedGradScaler``, on CPU and CUDA, with the same state dict.

    What it does otherwise:

    - The decision to skip is taken once for all ranks and optimizers: by the maximum, as exactly 0.0 or 1.0, in a
      0-dim tensor. Torch's sharded one has shape ``(1,)``, which fused optimizers refuse (pytorch#140514); is a sum,
      which they take for "finite" where it is 2; and without ``unscale_`` is each rank's own.
    - The scale stays within bounds, and moves as ``LossScale`` says: it grows one update later than torch's, at the
      start and after an overflow.
    - A 16-bit loss is scaled in fp32; torch's sharded one rounds it back, to infinity above 65504. (Its own backward
      still casts the scale to 16 bits: sum losses in fp32.)
    - Its device is asked for: torch's is ``cuda`` by default, and switches itself off where there is none.
    - One :meth:`step` can take several optimizers.

    Args:
        device: of the scale, and of most gradients.
        init_scale: of the first window.
        growth_factor: multiplies it after ``growth_interval`` updates in a row.
        backoff_factor: multiplies it at an overflow.
        growth_interval: see ``growth_factor``.
        enabled: False: :meth:`step` only steps, and everything else does nothing.
        process_group: the ranks that decide together; None for all.
        hysteresis: overflows until it shrinks; the count starts again after a growth.
        consecutive_hysteresis: the count starts again after every update as well.
        min_scale: it never falls below.
        max_scale: it never rises above.
        dynamic: False for a constant scale.

    Raises:
        ConfigError: it is enabled, and there is no such device.
        AssertionError: the growth factor is at most 1, or the backoff factor at least 1.
    """

    def __init__(
        self,
        device: torch.device | str,
        init_scale: float = _DEFAULT.initial_scale,
        *,
        growth_factor: float = _DEFAULT.growth_factor,
        backoff_factor: float = _DEFAULT.backoff_factor,
        growth_interval: int = _DEFAULT.growth_interval,
        enabled: bool = True,
        process_group: dist.ProcessGroup | None = None,
        hysteresis: int = _DEFAULT.hysteresis,
        consecutive_hysteresis: bool = _DEFAULT.consecutive_hysteresis,
        min_scale: float = _DEFAULT.min_scale,
        max_scale: float = _DEFAULT.max_scale,
        dynamic: bool = True,
    ) -> None:
        if enabled and torch.device(device).type != "cpu" and not torch.get_device_module(device).is_available():
            remedy = "Use cpu, or enabled=False for a scaler that does nothing"
            raise ConfigError("device", device, "there is no such device here", remedy)
        super().__init__(
            torch.device(device).type,
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=enabled,
            process_group=process_group,
        )
        if not enabled:
            return
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
        """The scale: 0-dim fp32, changed in place by :meth:`update`; 1 where it is not enabled."""
        return self._loss_scale.current if self._enabled else torch.ones(())

    def scale(self, outputs: Any) -> Any:
        """A loss (or an iterable of them) times the scale; 16-bit ones become fp32.

        Raises:
            ValueError: it is neither a tensor nor an iterable of tensors.
        """
        if not self._enabled:
            return outputs
        if isinstance(outputs, Tensor):
            return self._loss_scale.scale(outputs)
        if not isinstance(outputs, Iterable):
            problem = f"outputs must be a Tensor or an iterable of Tensors, not a {type(outputs).__name__}"
            raise ValueError(problem)  # noqa: TRY004  as torch's does
        scaled = map(self.scale, outputs)
        return type(outputs)(scaled) if isinstance(outputs, list | tuple) else scaled

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divides the optimizer's gradients by the scale, and finds whether any is not finite on any rank.

        Raises:
            RuntimeError: called twice, or after :meth:`step`, within one :meth:`update`.
        """
        if not self._enabled:
            return
        state = self._state_of(optimizer)
        if state["stage"] is not OptState.READY:
            raise RuntimeError("unscale_() was called already, or step() was, since the last update()")
        inverse = self.current.double().reciprocal().float()  # fp64, as torch does it
        found = self._unscale_grads_(optimizer, inverse, torch.zeros_like(self.current), allow_fp16=True)
        state["found_inf_per_device"] = {self.current.device: self._agree(list(found.values()))}
        state["stage"] = OptState.UNSCALED

    def _state_of(self, optimizer: Optimizer) -> dict[str, Any]:
        """What the optimizer has been through since the last :meth:`update`."""
        state = self._per_optimizer_states[id(optimizer)]
        state["optimizer"] = optimizer  # lives until then: the next one might get the id of one that is gone
        return state

    def _agree(self, found: list[Tensor]) -> Tensor:
        """1.0 if any device of any rank found something; 0-dim, where the scale lies."""
        anywhere = torch.stack([one.to(self.current.device) for one in found]).amax()
        if dist.is_initialized():
            dist.all_reduce(anywhere, op=dist.ReduceOp.MAX, group=self.process_group)
        return anywhere

    def _check_inf_per_device(self, optimizer: Optimizer) -> dict[Any, Tensor]:
        """For optimizers that are given the scaler and unscale by themselves: what any rank has found."""
        found = self._unscale_grads_(optimizer, torch.ones_like(self.current), torch.zeros_like(self.current), True)
        agreed = {self.current.device: self._agree(list(found.values()))}
        self._state_of(optimizer)["found_inf_per_device"] = agreed
        return agreed

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Steps all of them or none: none if a gradient of any optimizer that was unscaled is not finite on any rank.

        One call for all optimizers is one transaction; of several calls the first cannot know of the gradients that
        only the next one unscales: call :meth:`unscale_` for each before.

        Args:
            optimizer: to step.
            args: further optimizers; or, for one optimizer, the arguments of its ``step``.
            kwargs: of ``optimizer.step``.

        Returns:
            What the step of a single optimizer returned; None where it was skipped.

        Raises:
            RuntimeError: one of them has stepped since the last :meth:`update`; or a closure was given.
        """
        closure = kwargs.get("closure", args[0] if args and callable(args[0]) else None)
        if self._enabled and closure is not None:
            raise RuntimeError("a closure cannot be run again at another loss scale: call step() without one")
        optimizers, given = [optimizer], args
        if args and all(isinstance(one, Optimizer) for one in args):
            optimizers, given = [optimizer, *args], ()
        if not self._enabled:
            returned = [one.step(*given, **kwargs) for one in optimizers]
        else:
            returned = self._step_together(optimizers, *given, **kwargs)
        return returned[0] if len(optimizers) == 1 and returned else None

    def _step_together(self, optimizers: list[Optimizer], *args: Any, **kwargs: Any) -> list[Any]:
        states = [self._state_of(optimizer) for optimizer in optimizers]
        unscaled = [state["stage"] is OptState.UNSCALED for state in states]
        for optimizer, state in zip(optimizers, states, strict=True):
            if state["stage"] is OptState.STEPPED:
                raise RuntimeError("step() has been called since the last update()")
            if state["stage"] is OptState.READY and not _takes_scaler(optimizer):
                self.unscale_(optimizer)
        returned = []
        found = self._found() if not all(map(_takes_scaler, optimizers)) else torch.zeros_like(self.current)
        # A fused optimizer's first step makes state that the kernel leaves unset where ``found_inf`` is 1.
        on_host = not all(getattr(o, "_step_supports_amp_scaling", False) and o.state for o in optimizers)
        if not (on_host and found.item()):  # host read: an unfused step can only be left out by the host
            for optimizer, by_hand in zip(optimizers, unscaled, strict=True):
                if _takes_scaler(optimizer):
                    warnings.warn(_PASSES_ITSELF, FutureWarning, stacklevel=3)
                    step: Any = optimizer.step
                    returned.append(step(*args, **kwargs, grad_scaler=self))
                else:
                    returned.append(_step(optimizer, found, by_hand, *args, **kwargs))
        for state in states:
            state["stage"] = OptState.STEPPED
        return returned

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Once a window, after all steps: moves the scale, or sets it to ``new_scale``.

        Raises:
            AssertionError: no gradient was unscaled since the last call.
        """
        if not self._enabled:
            return
        if new_scale is not None:
            if isinstance(new_scale, Tensor):
                plain = new_scale.numel() == 1 and not new_scale.requires_grad
                assert plain, "new_scale should be a float, or a tensor of one element that needs no gradient"
                new_scale = new_scale.reshape(())
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
        if self._enabled:
            self._loss_scale.growth_factor = new_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        """Torch's setter, for the rule too."""
        super().set_backoff_factor(new_factor)
        if self._enabled:
            self._loss_scale.backoff_factor = new_factor

    def set_growth_interval(self, new_interval: int) -> None:
        """Torch's setter, for the rule too."""
        super().set_growth_interval(new_interval)
        if self._enabled:
            self._loss_scale.growth_interval = new_interval

    def _get_growth_tracker(self) -> int:
        """Updates in a row, for torch's own methods: 0 also for the row that needs one more."""
        return max(int(self._loss_scale.streak), 0) if self._enabled else super()._get_growth_tracker()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self._enabled:
            self._share_tensors()  # a copy's own

    def state_dict(self) -> dict[str, Any]:
        """Torch's five entries, and ``_hysteresis``; plain numbers, read from the device. Empty if not enabled."""
        return self._loss_scale.state_dict() if self._enabled else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores :meth:`state_dict`, or that of torch's: as in torch, the growth settings are the saved ones too.

        Raises:
            RuntimeError: the state is that of a scaler which was not enabled.
        """
        if not self._enabled:
            return
        if not state_dict:
            raise RuntimeError("the state is empty: it was saved by a scaler that was not enabled")
        self.set_growth_factor(state_dict["growth_factor"])
        self.set_backoff_factor(state_dict["backoff_factor"])
        self.set_growth_interval(state_dict["growth_interval"])
        self._loss_scale.load_state_dict(state_dict)
        self._init_growth_tracker = self._get_growth_tracker()  # torch's own; nothing here reads it


def _takes_scaler(optimizer: Optimizer) -> bool:
    """Whether the optimizer unscales by itself, by the deprecated argument ``grad_scaler`` of its step."""
    fused = getattr(optimizer, "_step_supports_amp_scaling", False)
    return bool(fused) and "grad_scaler" in inspect.signature(optimizer.step).parameters


def _step(optimizer: Any, found_inf: Tensor, unscaled_by_hand: bool, *args: Any, **kwargs: Any) -> Any:
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return optimizer.step(*args, **kwargs)
    # A scale that the caller has set himself is not the loss's, and still to be taken out.
    own = getattr(optimizer, "grad_scale", None)
    optimizer.grad_scale = torch.ones_like(found_inf) if own is None and not unscaled_by_hand else own
    optimizer.found_inf = found_inf
    returned = optimizer.step(*args, **kwargs)
    del optimizer.grad_scale, optimizer.found_inf
    return returned
