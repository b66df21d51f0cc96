"""A folder as Hugging Face's ``from_pretrained`` reads it: weights in several files, their index, the configuration."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from secrets import token_hex
from typing import Any

import torch
from torch import Tensor

from distaccum.checkpoint.tensors import save_whole
from distaccum.errors import CheckpointError, shorten

CONFIG = "config.json"
# What describes a model and its tokenizer, beside the weights.
_DESCRIBES = (
    *(CONFIG, "generation_config.json", "preprocessor_config.json", "chat_template.*"),
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model"),
)


def cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Floating-point tensors in ``dtype``; all others, and without one, as they are."""
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def save_folder(
    tensors: Mapping[str, Tensor], folder: Path, *, dtype: torch.dtype | None, shard_bytes: int, source: Path | None
) -> None:
    """Writes a folder, which is there whole or not at all.

    Tied weights are written under each of their names, which loads as one name does.

    Args:
        tensors: by name; one file's at a time are in memory.
        folder: must not be there.
        dtype: of floating-point tensors; None: as they are.
        shard_bytes: the most of one file, unless a tensor alone has more.
        source: a folder with ``config.json``, which is copied with the tokenizer's files; the format that it states is
            that of the weights written here.

    Raises:
        CheckpointError: the folder is there, or ``source`` has no ``config.json`` that can be read.
        OSError: something cannot be written.
    """
    if folder.exists():
        raise CheckpointError(f"{folder} is there: name another, or remove it")
    described = None if source is None else _config(source)
    staged = folder.with_name(f".{folder.name}.{token_hex(8)}")
    staged.mkdir()
    try:
        shards = _shards({name: cast(tensors[name], dtype).nbytes for name in tensors}, shard_bytes)
        homes: dict[str, str] = {}
        size, formats = 0, set[torch.dtype]()
        for number, names in enumerate(shards, 1):
            file = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
            part = {name: cast(tensors[name], dtype) for name in names}
            save_whole(part, staged / file)
            homes |= dict.fromkeys(names, file)
            size += sum(tensor.nbytes for tensor in part.values())
            formats |= {tensor.dtype for tensor in part.values() if tensor.is_floating_point()}
        if len(shards) > 1:
            index = {"metadata": {"total_size": size}, "weight_map": homes}
            (staged / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
        if source is not None and described is not None:
            _describe(source, described, formats, staged)
        for path in (*staged.iterdir(), staged):
            _sync(path)
        staged.rename(folder)
        _sync(folder.parent)
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise


def save_adapter(
    tensors: Mapping[str, Tensor],
    folder: Path,
    *,
    dtype: torch.dtype | None,
    names: Mapping[str, str],
    config: Mapping[str, Any],
) -> None:
    """Writes adapters as ``PeftModel.from_pretrained`` reads them; the folder is there whole or not at all.

    Args:
        tensors: by their names in the model.
        folder: must not be there.
        dtype: of floating-point tensors; None: as they are.
        names: PEFT's name of each.
        config: PEFT's description of them.

    Raises:
        CheckpointError: the folder is there, or a tensor is not the adapters'.
        OSError: something cannot be written.
    """
    if folder.exists():
        raise CheckpointError(f"{folder} is there: name another, or remove it")
    if others := sorted(tensors.keys() ^ names.keys()):
        problem = f"PEFT's files have no place for {shorten(others)}"
        raise CheckpointError(f"{problem}: export one file, NAME.safetensors, for init_from")
    staged = folder.with_name(f".{folder.name}.{token_hex(8)}")
    staged.mkdir()
    try:
        named = {given: cast(tensors[name], dtype) for name, given in names.items()}
        save_whole(named, staged / "adapter_model.safetensors")
        (staged / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        for path in (*staged.iterdir(), staged):
            _sync(path)
        staged.rename(folder)
        _sync(folder.parent)
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise


def _shards(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    """The names in their order, in parts of at most so many bytes, or of one tensor."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > most:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _config(source: Path) -> dict[str, Any]:
    try:
        found = json.loads((source / CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{source} has no {CONFIG} that can be read ({error})") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{source / CONFIG} is no mapping")
    return found


def _describe(source: Path, config: dict[str, Any], formats: set[torch.dtype], folder: Path) -> None:
    for pattern in _DESCRIBES:
        for path in source.glob(pattern):
            if path.is_file() and path.name != CONFIG:
                shutil.copyfile(path, folder / path.name)
    if len(formats) == 1:  # else from_pretrained would cast them to what the other folder had
        stated = str(formats.pop()).removeprefix("torch.")
        config |= {key: stated for key in ("dtype", "torch_dtype") if key in config} or {"dtype": stated}
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def _sync(path: Path) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
