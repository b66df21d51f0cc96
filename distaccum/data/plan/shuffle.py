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
        for key in self._keys:  # SplitMix64's finaliser needs arithmetic modulo 2**64: NumPy's arrays wrap
            z = right ^ key
            z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            left, right = right, left ^ ((z ^ (z >> np.uint64(31))) & self._mask)
        return (left << self._half) | right
