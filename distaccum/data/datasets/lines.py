"""Samples of different lengths: the lines of a text, byte by byte."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from distaccum.config.checks import require_fraction
from distaccum.data.collate import PadCollator, check_lengths
from distaccum.data.datasets.text import IGNORED, documentation
from distaccum.data.datasets.tokenizer import ByteTokenizer
from distaccum.data.spec import DataSpec
from distaccum.errors import ConfigError

_BYTES = 256


class Lines:
    """Sample = ``(inputs, labels)``, int64 of shape ``(T,)``; labels are the inputs shifted by one byte."""

    def __init__(self, lines: list[bytes]) -> None:
        self._lines = lines

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int, /) -> tuple[Tensor, Tensor]:
        line = torch.tensor(list(self._lines[index]))
        return line[:-1], line[1:]


def lines(
    *,
    path: str | None = None,
    seq_len: int = 128,
    held_out: float = 0.1,
    vocab_size: int = _BYTES,
    pad_to: int | None = None,
    pad_to_multiple_of: int | None = None,
) -> DataSpec:
    """The lines of a text file, or of CPython's documentation; every n-th line is held out.

    Batches are padded to their longest line, or as the last two settings say; padded labels do not count.

    Args:
        path: A UTF-8 text file. null: CPython's documentation.
        seq_len: Upper limit of a line in bytes; longer lines are truncated.
        held_out: Share of the lines to hold out, rounded to one in n.
        vocab_size: Number of token ids, always 256; models refer to it.
        pad_to: Pad every batch to this length, between that of the longest line and ``seq_len``.
        pad_to_multiple_of: Or: round the length of each batch up to a multiple of this; it must divide ``seq_len``.

    Raises:
        ConfigError: no such file, too few lines, or a share or length out of range.
    """
    require_fraction("data.held_out", held_out)
    if seq_len < 1:
        raise ConfigError("data.seq_len", seq_len, "must be at least 1", "Give the bytes of a line to read")
    check_lengths(pad_to, pad_to_multiple_of, key="data.")
    if pad_to_multiple_of is not None and seq_len % pad_to_multiple_of:
        problem = f"data.seq_len={seq_len} is no multiple of it, and models are made for no more"
        raise ConfigError("data.pad_to_multiple_of", pad_to_multiple_of, problem, "Give a divisor of data.seq_len")
    if vocab_size != _BYTES:
        raise ConfigError("data.vocab_size", vocab_size, "bytes have 256 values", "Leave it at 256")
    if path is not None and not Path(path).is_file():
        raise ConfigError("data.path", path, "no such file", "Give the path of a text file, or null")
    content = documentation() if path is None else Path(path).read_bytes()
    found = [line.strip()[: seq_len + 1] for line in content.splitlines()]
    found = [line for line in found if len(line) > 1]
    every = max(2, round(1 / held_out))
    train, rest = [line for i, line in enumerate(found) if i % every], found[::every]
    if not train:
        raise ConfigError("data.path", path, f"{len(found)} lines of two bytes or more", "Give a longer text")
    longest = max(map(len, found)) - 1
    if pad_to is not None and not longest <= pad_to <= seq_len:
        problem = f"the longest line used has {longest} bytes, and data.seq_len is {seq_len}"
        raise ConfigError("data.pad_to", pad_to, problem, f"Give a length from {longest} to {seq_len}")
    return DataSpec(
        train=Lines(train),
        eval_dataset=Lines(rest),
        description=f"{path or 'CPython documentation'}: {len(train):,} lines to train on, {len(rest):,} held out",
        collate=PadCollator((0, IGNORED), pad_to=pad_to, pad_to_multiple_of=pad_to_multiple_of),
        lengths=np.array([len(line) - 1 for line in train]),
        ignored={1: IGNORED},
        bytes_per_token=1.0,
        tokenizer=ByteTokenizer(),
    )
