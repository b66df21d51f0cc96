"""A model that has memory for so many samples in training, after some forwards that had enough for all."""

import os
from typing import Any

import torch

from distaccum.losses.cross_entropy import CrossEntropy
from distaccum.models.gpt import GPT


class GreedyGPT(GPT):
    """From forward number ``GREEDY_FROM`` of a process on it takes no more than ``GREEDY_ROWS`` samples at once."""

    _forwards = 0

    def forward(self, tokens: Any, *rest: Any, **more: Any) -> Any:
        if self.training and torch.is_grad_enabled():
            self._forwards += 1
            late = self._forwards >= int(os.environ["GREEDY_FROM"])
            if late and len(tokens) > int(os.environ["GREEDY_ROWS"]):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().forward(tokens, *rest, **more)


class Coupled(CrossEntropy):
    """No sum over samples: it grows with the square of their number."""

    def __call__(self, model: Any, batch: Any) -> Any:
        """The cross entropy, times the samples."""
        return super().__call__(model, batch) * len(batch[0])


class Uneven(CrossEntropy):
    """On rank 1 it draws what cannot be cut for parts of a micro-batch, on the others nothing."""

    def __call__(self, model: Any, batch: Any) -> Any:
        if os.environ["RANK"] == "1":
            torch.poisson(torch.ones(len(batch[0])))
        return super().__call__(model, batch)
