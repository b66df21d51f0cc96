"""Files as tensors of their bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from distaccum.elastic.engine.packed_files import is_packed, unpacked
from distaccum.engines import optimizer_state


def pack(folder: Path) -> dict[str, Tensor]:
    """As an older distaccum did."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    contents = {path.relative_to(folder).as_posix(): bytearray(path.read_bytes()) for path in paths}
    return {f"files.{name}": torch.frombuffer(content, dtype=torch.uint8) for name, content in contents.items()}


def test_files_come_back_byte_by_byte(tmp_path: Path) -> None:
    contents = {"a.bin": bytes(range(256)), "below/it/b.pt": b"weights"}
    for name, content in contents.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    packed = pack(tmp_path)
    assert all(map(is_packed, packed))
    assert all(tensor.dtype is torch.uint8 for tensor in packed.values())
    with unpacked(packed) as folder:
        assert {name: (folder / name).read_bytes() for name in contents} == contents
    assert not folder.exists()


def test_files_are_no_state_of_another_engines_optimizer(tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_bytes(b"adam")
    weight = nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match="DeepSpeed's own"):
        optimizer_state.load([torch.optim.SGD([weight])], {"weight": weight}, pack(tmp_path), {})
