"""An engine's own files as tensors of their bytes, where a state is kept in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

_PREFIX = "files."


def pack(folder: Path) -> dict[str, Tensor]:
    """The bytes of every file in a folder, as uint8, by ``files.PATH``."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        f"{_PREFIX}{path.relative_to(folder).as_posix()}": torch.frombuffer(
            bytearray(path.read_bytes()), dtype=torch.uint8
        )
        for path in paths
        if path.stat().st_size  # scripts that a format adds may be empty
    }


def is_packed(name: str) -> bool:
    """Whether a tensor of this name is a file."""
    return name.startswith(_PREFIX)


@contextmanager
def unpacked(tensors: Mapping[str, Tensor]) -> Iterator[Path]:
    """A folder, for the block, with the files that :func:`pack` read."""
    with TemporaryDirectory(prefix="distaccum-") as made:
        folder = Path(made)
        for name, content in tensors.items():
            path = folder / name.removeprefix(_PREFIX)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.cpu().numpy().tobytes())
        yield folder
