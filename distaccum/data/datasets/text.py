"""Byte-level text: any file or folder, and CPython's own documentation."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distaccum.config.checks import require_fraction
from distaccum.data.datasets.tokenizer import ByteTokenizer
from distaccum.data.spec import DataSpec
from distaccum.errors import ConfigError

# Bits per byte of simple models on the same split: the numbers to beat.

_SMOOTHING = 0.1  # added to every pair's count, so that a pair unseen in training has a probability


def byte_baselines(train: NDArray[np.uint8], held_out: NDArray[np.uint8]) -> dict[str, float]:
    """Held-out bits per byte of a byte-bigram model fitted on ``train``, and of ``zlib -9`` on the held-out part."""
    counts = np.full((256, 256), _SMOOTHING)
    np.add.at(counts, (train[:-1], train[1:]), 1)
    probabilities = counts / counts.sum(axis=1, keepdims=True)
    bigram = -np.log2(probabilities[held_out[:-1], held_out[1:]]).mean()
    packed = len(zlib.compress(held_out.tobytes(), 9))
    return {"byte bigram": float(bigram), "zlib -9": 8 * packed / len(held_out)}


# Token sequences cut into samples for next-token prediction.

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


_BYTES = 256


def docs(*, seq_len: int, held_out: float, vocab_size: int = _BYTES) -> DataSpec:
    """The topics of ``pydoc_data``, 470 kB of English that CPython contains; the last part is held out.

    Args:
        seq_len: Length of a sample in bytes.
        held_out: Share of the text to hold out.
        vocab_size: Number of token ids, always 256; models refer to it.
    """
    return _bytes_spec(
        documentation(), "CPython's documentation", seq_len=seq_len, held_out=held_out, vocab_size=vocab_size
    )


def documentation() -> bytes:
    """CPython's own documentation of the language, topic after topic.

    Raises:
        ConfigError: this Python does not contain it.
    """
    try:
        from pydoc_data.topics import topics  # noqa: PLC0415  half a megabyte that only these datasets need
    except ImportError as error:
        remedy = "Use data=text data.path=..., or a complete CPython"
        raise ConfigError("data", "docs", "this Python comes without pydoc_data", remedy) from error
    return "\n".join(topics[name] for name in sorted(topics)).encode()


def text(*, path: str, seq_len: int, held_out: float, vocab_size: int = _BYTES) -> DataSpec:
    """The bytes of a file, or of all files below a folder, sorted by name and without hidden ones.

    Args:
        path: A text file, or a folder of them.
        seq_len: Length of a sample in bytes.
        held_out: Share of the text to hold out, from its end.
        vocab_size: Number of token ids, always 256; models refer to it.

    Raises:
        ConfigError: ``path`` does not exist, or holds no text.
    """
    root = Path(path)
    if not root.exists():
        raise ConfigError("data.path", path, "no such file or folder", "Give the path of a text file or of a folder")
    files = [root] if root.is_file() else sorted(_visible_files(root))
    content = b"\n".join(file.read_bytes() for file in files)
    if not content.strip():
        raise ConfigError("data.path", path, f"holds no text ({len(files)} files)", "Give a path with text in it")
    return _bytes_spec(content, path, seq_len=seq_len, held_out=held_out, vocab_size=vocab_size)


def _visible_files(root: Path) -> list[Path]:
    found = (file for file in root.rglob("*") if file.is_file())
    return [file for file in found if not any(part.startswith(".") for part in file.relative_to(root).parts)]


def _bytes_spec(content: bytes, name: str, *, seq_len: int, held_out: float, vocab_size: int) -> DataSpec:
    if vocab_size != _BYTES:
        raise ConfigError("data.vocab_size", vocab_size, "bytes have 256 values", "Leave it at 256 for byte-level text")
    tokens = np.frombuffer(content, dtype=np.uint8)
    train, rest = split(tokens, held_out=held_out, seq_len=seq_len, vocab_size=vocab_size)
    cut = training_size(len(tokens), held_out)
    return DataSpec(
        train=train,
        eval_dataset=rest,
        description=f"{name}: {cut:,} bytes to train on, {len(tokens) - cut:,} held out",
        sample_tokens=seq_len,
        ignored={1: IGNORED},
        bytes_per_token=1.0,
        tokenizer=ByteTokenizer(),
        baselines=partial(byte_baselines, tokens[:cut], tokens[cut:]),
    )
