"""Token sequences cut into samples for next-token prediction."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distaccum.config.checks import require_fraction
from distaccum.errors import ConfigError

Tokens = NDArray[np.integer]
IGNORED = -100
"""A label that the losses leave out."""


class TokenBlocks:
    """Consecutive blocks of one or more token arrays; sample = ``(inputs, labels)``, int64 of shape ``(seq_len,)``.

    Labels are the inputs shifted by one token. No block crosses from one array into the next. Arrays may be memory
    maps: only the requested blocks are read.

    Args:
        arrays: 1-D integer arrays.
        seq_len: tokens per block.
        vocab_size: ids must be below it.
    """

    def __init__(self, arrays: Sequence[Tokens], *, seq_len: int, vocab_size: int) -> None:
        self._arrays, self._seq_len, self._vocab_size = list(arrays), seq_len, vocab_size
        blocks = [max(0, (len(array) - 1) // seq_len) for array in self._arrays]
        self._ends = np.cumsum(blocks, dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int, /) -> tuple[Tensor, Tensor]:
        """Raises ValueError if a token id of the block is outside the vocabulary."""
        array = int(np.searchsorted(self._ends, index, side="right"))
        begin = (index - (int(self._ends[array - 1]) if array else 0)) * self._seq_len
        tokens = self._arrays[array][begin : begin + self._seq_len + 1].astype(np.int64)
        if (largest := int(tokens.max())) >= self._vocab_size:
            raise ValueError(
                f"token id {largest} in tokens {begin}..{begin + self._seq_len} of shard {array}, "
                f"but data.vocab_size={self._vocab_size}: raise it, or correct data.dtype"
            )
        block = torch.from_numpy(tokens)
        return block[:-1], block[1:]


def training_size(tokens: int, held_out: float) -> int:
    """The number of tokens to train on, without the share ``held_out`` at their end."""
    return int(tokens * (1 - held_out))


def split(tokens: Tokens, *, held_out: float, seq_len: int, vocab_size: int) -> tuple[TokenBlocks, TokenBlocks]:
    """Blocks of the tokens to train on, and of the share ``held_out`` at their end.

    Raises:
        ConfigError: ``held_out`` or ``seq_len`` is out of range, or either part is shorter than one block.
    """
    require_fraction("data.held_out", held_out)
    if seq_len < 1:
        raise ConfigError("data.seq_len", seq_len, "must be at least 1", "Give the tokens of one sample")
    cut = training_size(len(tokens), held_out)
    for part, size in (("training", cut), ("held-out", len(tokens) - cut)):
        if size <= seq_len:
            raise ConfigError(
                "data.seq_len",
                seq_len,
                f"the {part} part has {size} tokens, and one sample takes {seq_len + 1}",
                "Give more text or a shorter data.seq_len",
            )
    return tuple(TokenBlocks([part], seq_len=seq_len, vocab_size=vocab_size) for part in (tokens[:cut], tokens[cut:]))  # type: ignore[return-value]
