"""Memory-mapped token shards: raw little-endian ids without a header, as nanoGPT and Megatron write them."""

from __future__ import annotations

import ctypes
import glob
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from weakref import finalize

import numpy as np

from distaccum.data.datasets.text import IGNORED, TokenBlocks, Tokens, split, training_size
from distaccum.data.datasets.tokenizer import load_tokenizer
from distaccum.data.spec import DataSpec
from distaccum.errors import ConfigError

_DTYPES: dict[str, np.dtype[np.unsignedinteger]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


def tokens(
    *,
    path: str,
    vocab_size: int,
    seq_len: int,
    dtype: str = "uint16",
    held_out: float = 0.01,
    held_out_path: str | Mapping[str, str] | None = None,
    tokenizer: str | None = None,
) -> DataSpec:
    """The shards that match the glob ``path``, sorted by name; a shard is memory-mapped, never loaded whole.

    Args:
        path: Pattern of the training files, such as ``data/train-*.bin``.
        vocab_size: Number of token ids; all ids must be below it.
        seq_len: Length of a sample in tokens.
        dtype (uint16 | uint32): Number format of the ids in the files.
        held_out: Share of the last file to hold out, from its end, if there is no ``held_out_path``.
        held_out_path: Pattern of the held-out files, or several by name: ``{news: "n/*.bin", code: "c/*.bin"}``.
        tokenizer: The tokenizer that made the ids, on the Hugging Face hub or in a folder; only used to show the texts
            of evaluations.

    Raises:
        ConfigError: no shard matches, or a shard is empty, too short, or no whole number of ids long; or the tokenizer
            cannot be loaded.
    """
    if dtype not in _DTYPES:
        raise ConfigError("data.dtype", dtype, "no such id format", f"Use one of {', '.join(_DTYPES)}")
    if vocab_size < 1:
        raise ConfigError("data.vocab_size", vocab_size, "must be at least 1", "Give the tokenizer's size")
    shards = _open("data.path", path, _DTYPES[dtype])
    rest: TokenBlocks | dict[str, TokenBlocks]
    if held_out_path is None:
        *whole, last = shards
        _, rest = split(last, held_out=held_out, seq_len=seq_len, vocab_size=vocab_size)
        shards = [*whole, last[: training_size(len(last), held_out)]]
    else:
        by_name = held_out_path if isinstance(held_out_path, Mapping) else {"": held_out_path}
        sets = {
            name: TokenBlocks(
                _open(f"data.held_out_path{'.' if name else ''}{name}", pattern, _DTYPES[dtype]),
                seq_len=seq_len,
                vocab_size=vocab_size,
            )
            for name, pattern in by_name.items()
        }
        rest = sets if isinstance(held_out_path, Mapping) else sets[""]
    train = TokenBlocks(shards, seq_len=seq_len, vocab_size=vocab_size)
    size = sum(len(shard) for shard in shards)
    description = f"{path}: {size:,} tokens in {len(shards)} shard{'' if len(shards) == 1 else 's'}"
    return DataSpec(
        train=train,
        eval_dataset=rest,
        description=description,
        sample_tokens=seq_len,
        ignored={1: IGNORED},
        tokenizer=None if tokenizer is None else load_tokenizer(tokenizer),
    )


def _open(key: str, pattern: str, dtype: np.dtype[np.unsignedinteger]) -> list[Tokens]:
    paths = sorted(Path(name) for name in glob.glob(pattern, recursive=True))  # noqa: PTH207  an absolute glob is fine here
    if not paths:
        raise ConfigError(key, pattern, "matches no file", "Give a path or a glob such as shards/*.bin, in quotes")
    for path in paths:
        if path.is_dir():
            raise ConfigError(key, pattern, f"{path} is a folder", f"Name its files, as in '{path}/*.bin'")
        size = path.stat().st_size
        if size == 0 or size % dtype.itemsize:
            problem = f"{path} has {size} bytes, no whole number of {dtype.itemsize}-byte ids"
            raise ConfigError(key, pattern, problem, "Give raw token ids, and their format as data.dtype")
    return [_mapped(path, dtype) for path in paths]


_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


def _mapped(path: Path, dtype: np.dtype[np.unsignedinteger]) -> Tokens:
    """The ids of a file, read as they are used; unlike ``np.memmap``, a map of thousands of files keeps none open."""
    size = path.stat().st_size
    with path.open("rb") as file:
        address = _LIBC.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
    if address in (None, ctypes.c_void_p(-1).value):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path))
    held = (ctypes.c_char * size).from_address(address)
    finalize(held, _LIBC.munmap, address, size).atexit = False
    ids: Tokens = np.frombuffer(memoryview(held), dtype=dtype)
    ids.flags.writeable = False
    return ids
