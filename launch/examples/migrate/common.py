"""The text, the model and the batches that the programs of this folder share.

The samples have one length each, so that every micro-batch counts as many labels as any other. With ``--ragged`` on the
command line they have unequal ones: there a mean of the micro-batches' means is not the mean of the global batch.
"""

from __future__ import annotations

import random
import sys
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

LENGTH = 32
IGNORED = -100

Sample = tuple[Tensor, Tensor]


def text(samples: int = 640) -> list[Sample]:
    """Bytes of CPython's documentation, and each one's next: ``(inputs, labels)``, of at most ``LENGTH``."""
    tokens = torch.tensor(list("\n".join(topics[name] for name in sorted(topics)).encode()[: samples * LENGTH + 1]))
    lengths = [LENGTH] * samples
    if "--ragged" in sys.argv:
        lengths = random.Random(0).choices(range(1, LENGTH + 1), k=samples)  # noqa: S311  a length is no secret
    found = []
    for i, length in enumerate(lengths):
        part = tokens[i * LENGTH : i * LENGTH + length + 1]
        found.append((part[:-1], part[1:]))
    return found


def collate(samples: list[Sample]) -> Sample:
    """One batch, padded to its longest sample; labels of the padding are ignored."""
    inputs, labels = zip(*samples, strict=True)
    return pad_sequence(inputs, batch_first=True), pad_sequence(labels, batch_first=True, padding_value=IGNORED)


class Net(nn.Module):
    """Bytes ``(B, T)`` to logits ``(B, T, 256)``."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(256, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 256))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)
