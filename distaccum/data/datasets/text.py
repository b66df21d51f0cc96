"""Byte-level text: any file or folder, and CPython's own documentation."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from distaccum.data.datasets.baselines import byte_baselines
from distaccum.data.datasets.blocks import IGNORED, split, training_size
from distaccum.data.datasets.tokenizer import ByteTokenizer
from distaccum.data.spec import DataSpec
from distaccum.errors import ConfigError

_BYTES = 256


def docs(*, seq_len: int, held_out: float, vocab_size: int = _BYTES) -> DataSpec:
    """The topics of ``pydoc_data``, 470 kB of English that CPython contains; the last part is held out.

    Args:
        seq_len: bytes of a sample.
        held_out: share of the text to hold out.
        vocab_size: always 256; a setting so that models can refer to it.
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
        path: of the file or the folder.
        seq_len: bytes of a sample.
        held_out: share of the text to hold out, its last part.
        vocab_size: always 256; a setting so that models can refer to it.

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
