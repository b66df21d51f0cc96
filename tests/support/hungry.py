"""A model that asks for more memory than there is: ``HOW`` says whose, on rank 1."""

import os

import torch
from torch import Tensor, nn

_CALL = 6  # with two micro-batches a window: the second one of window 3


class Hungry(nn.Module):
    """Classes of small images; its sixth forward needs 64 TiB of the host, or raises what a GPU's allocator does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 10)
        self._calls = 0

    def forward(self, images: Tensor) -> Tensor:
        self._calls += 1
        if self._calls == _CALL and os.environ.get("RANK") == "1":
            if os.environ["HOW"] == "device":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total\nof 1")
            torch.empty(2**46)
        logits: Tensor = self.linear(images.flatten(1))
        return logits
