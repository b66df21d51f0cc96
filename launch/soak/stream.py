"""CPython's documentation as a stream: each rank has every so many blocks of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from distaccum.data.datasets.text import docs
from distaccum.data.spec import DataSpec, MapDataset


class Blocks:
    """This rank's blocks, in their order, from the first one in every epoch."""

    def __init__(self, blocks: MapDataset) -> None:
        self._blocks = blocks

    def __iter__(self) -> Iterator[Any]:
        rank, size = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
        return (self._blocks[index] for index in range(rank, len(self._blocks), size))


def documentation(*, seq_len: int, held_out: float, vocab_size: int) -> DataSpec:
    """The dataset ``docs``, with its training samples as a stream."""
    spec = docs(seq_len=seq_len, held_out=held_out, vocab_size=vocab_size)
    return replace(spec, train=Blocks(spec.train), shuffle=False)  # type: ignore[arg-type]  docs are map-style
