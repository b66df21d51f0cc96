"""DeepSpeed's own files as tensors of their bytes, ``files.PATH``: so an older distaccum kept a state in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from torch import Tensor

_PREFIX = "files."


def is_packed(name: str) -> bool:
    """Whether a tensor of this name is a file."""
    return name.startswith(_PREFIX)


@contextmanager
def unpacked(tensors: Mapping[str, Tensor]) -> Iterator[Path]:
    """A folder, for the block, with the files that they are of."""
    with TemporaryDirectory(prefix="distaccum-") as made:
        folder = Path(made)
        for name, content in tensors.items():
            path = folder / name.removeprefix(_PREFIX)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.cpu().numpy().tobytes())
        yield folder
