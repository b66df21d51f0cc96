"""Is a micro-batch's loss the sum of its parts' losses? Asked before a micro-step is finished in parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from distaccum.data.batches import to_device
from distaccum.engines.base import Engine
from distaccum.engines.buffers import state_restored
from distaccum.engines.compiled import uncompiled
from distaccum.engines.modules import evaluating
from distaccum.losses.base import Loss
from distaccum.losses.normalize import as_loss_sums
from distaccum.verification.additivity import in_16_bits

_ROUNDING = 1e-4  # of the same samples in another shape; a mean is off by a half
_ROUNDING_16 = 3e-2


def what_does_not_add_up(engine: Engine, loss: Loss, whole: Any, parts: Sequence[Any]) -> str:
    """In words, the loss of ``whole`` and that of its parts where they differ; empty where it is a sum.

    In evaluation mode and without a graph: dropout would differ from one to the other, and a forward takes less memory.
    Reads the device.

    Args:
        engine: of the model; its forward does not communicate.
        loss: of a micro-batch.
        whole: a micro-batch on the host.
        parts: the same samples, on the host.
    """
    model = engine.unwrapped_model

    def measured(batch: Any) -> Mapping[str, float]:
        with engine.autocast():
            sums = as_loss_sums(loss(model, to_device(batch, engine.device)))
        return {name: float(part) for name, part in sums.items()}

    with evaluating(model), uncompiled(model), torch.no_grad(), state_restored(engine):
        expected, found = measured(whole), [measured(part) for part in parts]
    rounding = _ROUNDING_16 if in_16_bits(engine) else _ROUNDING
    for name, value in expected.items():
        apart = [losses.get(name, 0.0) for losses in found]
        bound = rounding * max(abs(value), *map(abs, apart))
        if not abs(sum(apart) - value) <= bound:
            return f"{value:.6g} as a whole and {sum(apart):.6g} in parts"
    return ""
