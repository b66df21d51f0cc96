"""Data, a model and a loss that the replayed commands name by ``_target_``: streams, and a sample that is NaN."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

WIDTH = 3


class Numbers(Dataset[Tensor]):
    """Random rows of ``WIDTH`` numbers; the one at ``broken`` holds a NaN."""

    def __init__(self, size: int, broken: int = -1) -> None:
        self._rows = torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(0))
        if broken >= 0:
            self._rows[broken, 0] = float("nan")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Tensor:
        return self._rows[index]


class Stream(IterableDataset[Tensor]):
    """Of each rank another number of rows."""

    def __init__(self, sizes: list[int]) -> None:
        self._sizes = list(sizes)

    def __iter__(self) -> Iterator[Tensor]:
        rank = dist.get_rank() if dist.is_initialized() else 0
        generator = torch.Generator().manual_seed(rank)
        for _ in range(self._sizes[rank]):
            yield torch.randn(WIDTH, generator=generator)


class Squares:
    """The sum of squared outputs, over the number of samples."""

    def count(self, batch: Tensor) -> int:
        return len(batch)

    def __call__(self, model: nn.Module, batch: Tensor) -> Any:
        return (model(batch) - 1).square().sum()
