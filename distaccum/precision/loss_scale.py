"""The loss scale of fp16: a number on the device that one decision a window moves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from distaccum.config.precision import ScalerConfig

# Updates in a row, counted from -1 after an overflow: there DeepSpeed waits for one more than between two growths.
_AFTER_OVERFLOW = -1


class LossScale:
    """The scale, and the rule that moves it; everything stays on the device.

    An overflow and a row of updates move the scale as they do in DeepSpeed's ``DynamicLossScaler`` with ``hysteresis``
    (its ``delayed_shift``) and ``consecutive_hysteresis``. The scale stays within bounds: torch's ``GradScaler`` falls
    to 0, from where the next gradients are NaN without being found so, and on the CPU grows to infinity.

    Args:
        device: of the scale, and of most gradients.
        init_scale: of the first window.
        growth_factor: multiplies it after ``growth_interval`` updates in a row; after an overflow or at the start,
            after one more.
        backoff_factor: multiplies it at an overflow.
        growth_interval: see ``growth_factor``.
        hysteresis: overflows until it shrinks; the count starts again after a growth.
        consecutive_hysteresis: the count starts again after every update as well.
        min_scale: it never falls below.
        max_scale: it never rises above.
        dynamic: False for a constant scale.
    """

    def __init__(
        self,
        device: torch.device | str,
        *,
        init_scale: float,
        growth_factor: float,
        backoff_factor: float,
        growth_interval: int,
        hysteresis: int,
        consecutive_hysteresis: bool,
        min_scale: float,
        max_scale: float,
        dynamic: bool,
    ) -> None:
        lowest, highest = (min_scale, max_scale) if dynamic else (init_scale, init_scale)
        # As fp32 has them, for the scale is compared with them.
        self.min_scale, self.max_scale = torch.tensor([lowest, highest], dtype=torch.float32).tolist()
        self.dynamic = dynamic
        self.growth_factor = growth_factor
        self.backoff_factor = backoff_factor
        self.growth_interval = growth_interval
        self._hysteresis = hysteresis
        self._consecutive = consecutive_hysteresis
        options: Any = {"device": device}
        self._scale = torch.full((), init_scale, dtype=torch.float32, **options)
        self._streak = torch.full((), _AFTER_OVERFLOW, dtype=torch.int32, **options)
        self._left = torch.full((), hysteresis, dtype=torch.int32, **options)

    @classmethod
    def of(cls, config: ScalerConfig, device: torch.device | str) -> LossScale:
        """The loss scale that ``conf/precision/`` describes."""
        return cls(
            device,
            init_scale=config.initial_scale,
            growth_factor=config.growth_factor,
            backoff_factor=config.backoff_factor,
            growth_interval=config.growth_interval,
            hysteresis=config.hysteresis,
            consecutive_hysteresis=config.consecutive_hysteresis,
            min_scale=config.min_scale,
            max_scale=config.max_scale,
            dynamic=config.static_scale is None,
        )

    @property
    def current(self) -> Tensor:
        """The scale: 0-dim fp32, changed in place by :meth:`advance`."""
        return self._scale

    @property
    def floor(self) -> float | None:
        """Where the scale cannot fall any further; None for a constant one."""
        return self.min_scale if self.dynamic else None

    @property
    def streak(self) -> Tensor:
        """Updates in a row since the last overflow or growth: 0-dim int32, changed in place."""
        return self._streak

    def scale(self, loss: Tensor) -> Tensor:
        """A loss times the scale; a 16-bit one becomes fp32, whose range the product needs."""
        wide = loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss
        return wide * self._scale.to(loss.device, non_blocking=True)

    def set(self, scale: float | Tensor) -> None:
        """Sets the scale, within its bounds."""
        self._scale.fill_(scale).clamp_(self.min_scale, self.max_scale)

    def advance(self, found_inf: Tensor) -> None:
        """Moves the scale by one window's decision: 0-dim, 1.0 for an overflow, else 0.0. Reads nothing back."""
        if not self.dynamic:
            return
        overflowed = found_inf > 0
        streak = (self._streak + 1).masked_fill_(overflowed, _AFTER_OVERFLOW)
        grows, shrinks = streak >= self.growth_interval, overflowed & (self._left <= 1)
        factor = torch.ones_like(self._scale).masked_fill_(grows, self.growth_factor)
        factor.masked_fill_(shrinks, self.backoff_factor)
        self._scale.mul_(factor).clamp_(self.min_scale, self.max_scale)
        self._streak.copy_(streak.masked_fill_(grows, 0))
        if self._hysteresis > 1:
            refilled = grows | ~overflowed if self._consecutive else grows
            self._left.sub_(overflowed.int()).clamp_(min=1).masked_fill_(refilled, self._hysteresis)

    def state_dict(self) -> dict[str, Any]:
        """The five entries of torch's ``GradScaler``, and ``_hysteresis``; plain numbers, read from the device."""
        return {
            "scale": self._scale.item(),
            "growth_factor": self.growth_factor,
            "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval,
            "_growth_tracker": int(self._streak),
            "_hysteresis": int(self._left),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores scale, row and hysteresis of :meth:`state_dict`, or of torch's; the settings stay this run's."""
        if self.dynamic:
            self.set(state["scale"])
            self._streak.fill_(state["_growth_tracker"])
            self._left.fill_(min(state.get("_hysteresis", self._hysteresis), self._hysteresis))
