"""Learning-rate schedules: pure functions from the number of applied updates to a factor of ``optim.lr``."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from distaccum.config.checks import require_choice
from distaccum.errors import ON_ALL_RANKS, ConfigError

_log = logging.getLogger(__name__)
_TRIAL = 10  # updates of a warm-up of which nothing is said: the run is one of a few updates


class Constant:
    """The peak rate after a linear warm-up.

    Args:
        total_steps: updates of the run.
        warmup_steps: Steps of the warm-up. null: ``warmup_ratio`` applies.
        warmup_ratio: Share of all steps that the warm-up takes: 0.1 is a tenth.
    """

    def __init__(self, *, total_steps: int, warmup_steps: int | None = None, warmup_ratio: float = 0.0) -> None:
        self._warmup = _Warmup(warmup_steps, warmup_ratio, total_steps)

    def __call__(self, step: int) -> float:
        """Rises to 1, then stays."""
        return self._warmup(step)


class _Falling:
    """A linear warm-up, the peak rate, and a fall to ``final_ratio`` in the last ``steps`` updates (None: all others).

    Its form gives what is left of the peak, from the share of the fall that is over.
    """

    def __init__(
        self, form: str, warmup: _Warmup, total_steps: int, final_ratio: float, steps: int | None = None
    ) -> None:
        self._warmup, self._form = warmup, _FORMS[form]
        self._final_ratio = _ratio("final_ratio", final_ratio)
        steps = total_steps - warmup.steps if steps is None else steps
        self._begin, self._steps = total_steps - steps, max(1, steps)

    def __call__(self, step: int) -> float:
        """Rises to 1, stays, falls to ``final_ratio``."""
        share = min(max(0.0, (step - self._begin) / self._steps), 1.0)
        return self._warmup(step) * (self._final_ratio + (1 - self._final_ratio) * self._form(share))


class Cosine(_Falling):
    """A linear warm-up, then half a cosine down to ``final_ratio`` at ``total_steps``, and constant after it.

    Source: I. Loshchilov and F. Hutter, "SGDR" (2017), without restarts.

    Args:
        total_steps: updates until the end of the fall.
        warmup_steps: Steps of the warm-up. null: ``warmup_ratio`` applies.
        warmup_ratio: Share of all steps that the warm-up takes: 0.1 is a tenth.
        final_ratio: Factor of the learning rate at the end of the schedule and after it.
    """

    def __init__(
        self, *, total_steps: int, warmup_steps: int | None = None, warmup_ratio: float = 0.0, final_ratio: float = 0.1
    ) -> None:
        super().__init__("cosine", _Warmup(warmup_steps, warmup_ratio, total_steps), total_steps, final_ratio)


class Linear(_Falling):
    """A linear warm-up, then a straight line down to ``final_ratio`` at ``total_steps``, and constant after it.

    Source: without ``final_ratio`` that of A. Defazio et al., "Optimal linear decay learning rate schedules and further
    refinements" (2023).

    Args:
        total_steps: updates until the end of the fall.
        warmup_steps: Steps of the warm-up. null: ``warmup_ratio`` applies.
        warmup_ratio: Share of all steps that the warm-up takes: 0.1 is a tenth.
        final_ratio: Factor of the learning rate at the end of the schedule and after it.
    """

    def __init__(
        self, *, total_steps: int, warmup_steps: int | None = None, warmup_ratio: float = 0.0, final_ratio: float = 0.0
    ) -> None:
        super().__init__("linear", _Warmup(warmup_steps, warmup_ratio, total_steps), total_steps, final_ratio)


class WSD(_Falling):
    """Warm-up, stable, decay: a linear warm-up, the peak rate, and a fall in the last updates before ``total_steps``.

    The stable part knows no end. To train on from a checkpoint of it, raise ``trainer.max_steps``: every step before
    the decay of the longer run has the same rate.

    Source: S. Hu et al., "MiniCPM" (2024); for the form and the length of the decay A. Hägele et al., "Scaling laws and
    compute-optimal training beyond fixed training durations" (2024), where ``sqrt`` is 1 - sqrt(share of the decay).

    Args:
        total_steps: updates until the end of the decay.
        warmup_steps: Steps of the warm-up. null: ``warmup_ratio`` applies.
        warmup_ratio: Share of all steps that the warm-up takes: 0.1 is a tenth.
        decay_ratio: Share of all steps in which the rate decays.
        decay (linear | sqrt | cosine): Form of the decay.
        final_ratio: Factor of the learning rate at the end of the schedule and after it.
    """

    def __init__(
        self,
        *,
        total_steps: int,
        warmup_steps: int | None = None,
        warmup_ratio: float = 0.0,
        decay_ratio: float = 0.2,
        decay: str = "linear",
        final_ratio: float = 0.0,
    ) -> None:
        require_choice("schedule.decay", decay, tuple(_FORMS))
        warmup = _Warmup(warmup_steps, warmup_ratio, total_steps)
        steps = max(1, round(_ratio("decay_ratio", decay_ratio) * total_steps))
        super().__init__(decay, warmup, total_steps, final_ratio, steps)


# From the share of a decay that is over to what is left of the peak.
_FORMS: dict[str, Callable[[float], float]] = {
    "linear": lambda share: 1 - share,
    "sqrt": lambda share: 1 - math.sqrt(share),
    "cosine": lambda share: (1 + math.cos(math.pi * share)) / 2,
}


def _ratio(name: str, value: float) -> float:
    if not 0 <= value <= 1:
        raise ConfigError(f"schedule.{name}", value, "not between 0 and 1", "Give a share, such as 0.1")
    return value


class _Warmup:
    """A linear rise over ``steps`` updates: those that are stated, or a share of all."""

    def __init__(self, steps: int | None, ratio: float, total_steps: int) -> None:
        if steps is not None and steps < 0:
            raise ConfigError("schedule.warmup_steps", steps, "negative", "Use 0 or more updates")
        share = _ratio("warmup_ratio", ratio)
        if steps is not None and steps > _TRIAL and 10 * steps > total_steps > 0:
            text = "schedule.warmup_steps=%d is more than a tenth of the run's %d updates"
            _log.warning(text, steps, total_steps, extra=ON_ALL_RANKS)
        self.steps = round(share * total_steps) if steps is None else steps

    def __call__(self, step: int) -> float:
        return min(1.0, (step + 1) / (self.steps + 1))
