"""Training data that needs no file: random token ids in host memory."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset

from distaccum.data.spec import DataSpec


class RandomTokens(Dataset[tuple[Tensor, Tensor]]):
    """Rows of ids, each a sample: inputs ``(seq_len,)`` and labels, the inputs one further.

    Args:
        samples: number of rows.
        seq_len: tokens of a row.
        vocab_size: ids are below it.
    """

    def __init__(self, samples: int, *, seq_len: int, vocab_size: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._rows = torch.randint(vocab_size, (samples, seq_len + 1), generator=generator)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = self._rows[index]
        return row[:-1], row[1:]


def random_tokens(samples: int, *, seq_len: int, vocab_size: int) -> DataSpec:
    """Training data alone, of so many rows: see :class:`RandomTokens`."""
    rows = RandomTokens(samples, seq_len=seq_len, vocab_size=vocab_size)
    return DataSpec(train=rows, eval_dataset=None, description="random tokens")
