"""Data sources that go wrong, for tests to name as ``data._target_``."""

from __future__ import annotations

import os
import sys

import torch


class FailsOnRankOne:
    """Raises in the middle of an epoch, on rank 1 alone."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int, /) -> tuple[torch.Tensor, torch.Tensor]:
        if index == 7 and os.environ.get("RANK") == "1":
            raise OSError("the disk of rank 1 is gone")
        return torch.zeros(1, 8, 8), torch.tensor(0)


class HasNoLength:
    """Raises before the first window."""

    def __len__(self) -> int:
        raise OSError("the index cannot be read")

    def __getitem__(self, index: int, /) -> None: ...


def leaves() -> None:
    """Ends the process with a text, as scripts do."""
    sys.exit("the token is missing")


class OneSampleIsNaN:
    """64 small images; number 7 has one pixel that is NaN."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int, /) -> tuple[torch.Tensor, torch.Tensor]:
        if index >= len(self):
            raise IndexError(index)
        image = torch.randn(1, 8, 8, generator=torch.Generator().manual_seed(index))
        if index == 7:
            image[0, 3, 4] = torch.nan
        return image, torch.tensor(index % 10)
