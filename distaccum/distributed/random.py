"""The random numbers that loading draws in the training process."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import torch


def capture() -> Callable[[], None]:
    """Notes where the generators of torch, NumPy and Python are on the host; what is returned goes back there."""
    torchs, numpys, pythons = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002

    def restore() -> None:
        torch.set_rng_state(torchs)
        np.random.set_state(numpys)  # noqa: NPY002
        random.setstate(pythons)

    return restore
