"""Bits per byte of simple models on the same split: the numbers to beat."""

from __future__ import annotations

import zlib

import numpy as np
from numpy.typing import NDArray

_SMOOTHING = 0.1  # added to every pair's count, so that a pair unseen in training has a probability


def byte_baselines(train: NDArray[np.uint8], held_out: NDArray[np.uint8]) -> dict[str, float]:
    """Held-out bits per byte of a byte-bigram model fitted on ``train``, and of ``zlib -9`` on the held-out part."""
    counts = np.full((256, 256), _SMOOTHING)
    np.add.at(counts, (train[:-1], train[1:]), 1)
    probabilities = counts / counts.sum(axis=1, keepdims=True)
    bigram = -np.log2(probabilities[held_out[:-1], held_out[1:]]).mean()
    packed = len(zlib.compress(held_out.tobytes(), 9))
    return {"byte bigram": float(bigram), "zlib -9": 8 * packed / len(held_out)}
