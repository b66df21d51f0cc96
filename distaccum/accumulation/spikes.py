"""Spikes of the gradient norm: which windows stand out from those before, by how much, and what was done about them.

The norm of the global gradient is judged, not the loss: every rank has the same one before the step, so that a window
can be skipped at no collective, and it jumps in the window that would do the harm, where the loss shows it one later.

Source of the rule: OLMo-core's ``SkipStepOptimizer`` (6 deviations over the last 128 steps, from half of them on; it
judges the loss as well) and ZClip (A. Kumar et al., 2025), where a spike enters the statistics cut to the bound, so
that a lasting rise is followed.
"""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Mapping
from typing import Any

from distaccum.config.checks import ON_SPIKE, require_choice, require_count, require_positive_number, whole_number

_LEAST_DEVIATION = 0.01  # of the mean: norms that hardly differ have no deviation to speak of


class Spikes:
    """Judges the gradient norms of windows, each by the ``window`` ones before it.

    A norm is a spike from ``mean + zscore * deviation`` on, once there are half as many. The deviation is that of a
    population, and at least 1 % of the mean. A spike counts as that bound; a NaN or infinite norm is none, and does
    not count.

    Args:
        zscore: deviations above the mean.
        window: norms that are remembered.
        skips: whether a window with a spike makes no step.
    """

    def __init__(self, *, zscore: float, window: int, skips: bool) -> None:
        self._zscore, self._least, self.skips = zscore, -(-window // 2), skips
        self._norms: deque[float] = deque(maxlen=window)
        self.bound = math.inf
        """The next norm is a spike from here on; a number that fp32 can hold, as the norms are compared in it."""
        self.total = self.in_a_row = self.rollbacks = 0
        self.rolled_back: tuple[int, int] = (-1, 0)
        """The step that the run was rolled back to last, and how often to that one."""
        self.last = ""
        """The last spike in words."""
        self._score: float | None = None

    @classmethod
    def of(cls, on_spike: str, *, zscore: float, window: int) -> Spikes | None:
        """By the settings; None for ``off``.

        Raises:
            ConfigError: a setting that cannot work.
        """
        require_choice("on_spike", on_spike, ON_SPIKE)
        require_positive_number("spike_zscore", zscore)
        window = whole_number("spike_window", window)
        require_count("spike_window", window, least=2)
        return None if on_spike == "off" else cls(zscore=float(zscore), window=window, skips=on_spike == "skip")

    def note(self, norm: float) -> bool:
        """Whether the norm of a window is a spike; it is remembered."""
        if not math.isfinite(norm):
            return False
        spike = norm >= self.bound
        self._score = None
        if self.bound < math.inf:
            mean, deviation = self._statistics()
            self._score = (norm - mean) / deviation if deviation else 0.0
            if spike:
                over = f"{self._score:.1f} deviations above the mean of the last {len(self._norms)}, {mean:.4g}"
                self.last = f"its gradient norm is {norm:.4g}, {over}"
        self.total, self.in_a_row = self.total + spike, self.in_a_row + 1 if spike else 0
        self._norms.append(min(norm, self.bound))
        self._find_bound()
        return spike

    @property
    def metrics(self) -> dict[str, float]:
        """Of the last window: its score, where there is one; and how many spikes and rollbacks there were so far."""
        score = {} if self._score is None else {"grad_norm_zscore": self._score}
        return {"spikes": self.total, **score, **({"rollbacks": self.rollbacks} if self.rollbacks else {})}

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint, as JSON holds it."""
        return {
            "norms": list(self._norms),
            "score": self._score,
            "total": self.total,
            "in_a_row": self.in_a_row,
            "rollbacks": self.rollbacks,
            "rolled_back": list(self.rolled_back),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores :meth:`state_dict`; of a longer window its last norms."""
        self.forget()
        self._norms.extend(state.get("norms", ()))
        self._score = state.get("score")
        self.total, self.in_a_row = state.get("total", 0), state.get("in_a_row", 0)
        self.rollbacks = state.get("rollbacks", 0)
        step, times = state.get("rolled_back", (-1, 0))
        self.rolled_back = (step, times)
        self._find_bound()

    def roll_back(self, step: int, state: Mapping[str, Any]) -> int:
        """Goes back to the statistics of a checkpoint. Returns how often the run has been rolled back to its step."""
        times = 1 + (self.rolled_back[1] if self.rolled_back[0] == step else 0)
        total, rollbacks = self.total, self.rollbacks + 1
        self.load_state_dict(state)
        self.total, self.rollbacks, self.rolled_back = total, rollbacks, (step, times)
        return times

    def forget(self) -> None:
        """As a run that has just begun."""
        self._norms.clear()
        self.bound, self._score = math.inf, None
        self.total = self.in_a_row = self.rollbacks = 0
        self.rolled_back = (-1, 0)

    def _statistics(self) -> tuple[float, float]:
        number = len(self._norms)
        mean = math.fsum(self._norms) / number
        variance = math.fsum([(norm - mean) ** 2 for norm in self._norms]) / number
        return mean, max(math.sqrt(variance), _LEAST_DEVIATION * mean)

    def _find_bound(self) -> None:
        if len(self._norms) < self._least:
            self.bound = math.inf
            return
        mean, deviation = self._statistics()
        self.bound = _as_fp32(mean + self._zscore * deviation) or math.inf  # no gradient so far: nothing stands out


def _as_fp32(number: float) -> float:
    try:
        return float(struct.unpack("f", struct.pack("f", number))[0])
    except OverflowError:
        return math.inf
