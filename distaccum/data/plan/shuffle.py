"""An epoch's order as a function of ``(seed, epoch)``, computed position by position.

A permutation array would cost 8 bytes per sample on every rank (8 GB for a billion samples), and its construction at
every epoch and resume. A Feistel network is a keyed bijection that answers any position in O(1) memory. No maintained
Python package offers one outside whole frameworks (TensorFlow has it), hence these forty lines.

Source: M. Luby and C. Rackoff, "How to construct pseudorandom permutations" (1988), for the network; J. Black and
P. Rogaway, "Ciphers with arbitrary finite domains" (2002), for cycle walking; the round function is the finaliser of
SplitMix64 (G. Steele, D. Lea and C. Flood, 2014).
"""

from __future__ import annotations

import hashlib
import zlib

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 8


class Shuffle:
    """The permutation of ``range(samples)`` for ``(seed, epoch)``, in O(1) memory.

    Example:
        ``Shuffle(10, seed=0, epoch=0)(np.arange(3))`` gives the ids of the epoch's first three samples.
    """

    def __init__(self, samples: int, *, seed: int, epoch: int) -> None:
        self._samples = samples
        # The network permutes 2*half bits; walking the cycle brings a result back below `samples` (under 4 tries).
        half = max(1, -(-(samples - 1).bit_length() // 2))
        self._half, self._mask = np.uint64(half), np.uint64((1 << half) - 1)
        digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8 * _ROUNDS).digest()
        self._keys = np.frombuffer(digest, dtype="<u8")

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Sample ids at ``positions`` (any shape, each in ``[0, samples)``)."""
        ids = self._network(positions.astype(np.uint64))
        while (outside := ids >= self._samples).any():
            ids[outside] = self._network(ids[outside])
        return ids.astype(np.int64)

    def _network(self, x: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = x >> self._half, x & self._mask
        for key in self._keys:
            left, right = right, left ^ (_finalised(right ^ key) & self._mask)
        return (left << self._half) | right


def _finalised(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser, which needs arithmetic modulo 2**64: NumPy's arrays wrap."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


class Weights:
    """Draws samples with replacement, each as often as its weight says: what is drawn at a position is known alone.

    As torch's ``WeightedRandomSampler``, but a function of ``(seed, epoch, position)``: SplitMix64 gives a position's
    number below the sum of the weights, and the sample in whose part of that sum it lies is drawn.

    Args:
        weights: of each sample, shape ``(samples,)``; at least 0, and one is above it.
    """

    def __init__(self, weights: NDArray[np.float64]) -> None:
        self._ends, self._last = np.cumsum(weights), int(np.flatnonzero(weights)[-1])
        self.digest = zlib.crc32(weights.tobytes())

    def draw(self, seed: int, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The samples drawn at ``positions`` of an epoch."""
        key = np.frombuffer(hashlib.blake2b(f"weights/{seed}/{epoch}".encode(), digest_size=8).digest(), dtype="<u8")
        numbers = _finalised(key + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))
        within = (numbers >> np.uint64(11)).astype(np.float64) * 2.0**-53 * self._ends[-1]
        drawn: NDArray[np.int64] = np.searchsorted(self._ends, within, side="right").clip(max=self._last)
        return drawn
