"""Documents to pack, a model for them, and the gradient of the documents alone: fp64, one process, one forward each."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distaccum import DataSpec, PadCollator
from distaccum.models.gpt import GPT

VOCABULARY, LONGEST = 23, 14
LENGTHS = (9, 3, 14, 2, 7, 5, 11, 4, 6, 13, 2, 8, 10)
WINDOW = 5  # documents: windows of 5, 5 and 3
Document = tuple[Tensor, Tensor]


def documents() -> list[Document]:
    """Inputs, and the labels of each token; of different lengths."""
    draws = torch.Generator().manual_seed(7)
    lines = [torch.randint(0, VOCABULARY, (length + 1,), generator=draws) for length in LENGTHS]
    return [(line[:-1], line[1:]) for line in lines]


def spec(samples: Any = None) -> DataSpec:
    """In order, padded; not packed yet."""
    samples = samples or documents()
    named = isinstance(samples[0], dict)
    padding: Any = {"input_ids": 0, "attention_mask": 0, "labels": -100} if named else (0, -100)
    lengths = [len(one["input_ids"] if named else one[0]) for one in samples]
    return DataSpec(
        train=samples,
        eval_dataset=samples[:5],
        collate=PadCollator(padding),
        lengths=np.array(lengths),
        shuffle=False,
        description="documents",
    )


def make_model(positions: str = "rotary", dropout: float = 0.0) -> GPT:
    sizes: Any = {"n_layer": 2, "n_head": 2, "n_embd": 16}
    model = GPT(vocab_size=VOCABULARY, seq_len=LONGEST, positions=positions, dropout=dropout, **sizes)
    draws = torch.Generator().manual_seed(3)  # of its own: ranks that are threads have one global generator
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draws) / 4)
    return model


def alone(model: nn.Module, chosen: Sequence[Document]) -> Tensor:
    """The summed loss of documents, each in a forward of its own."""
    losses = [F.cross_entropy(model(ids[None])[0], labels, reduction="sum") for ids, labels in chosen]
    return torch.stack(losses).sum()


def descend(model: nn.Module, updates: int) -> dict[str, Tensor]:
    """The weights' change by so many windows of SGD at a rate of 1, each of its documents alone."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    every = documents()
    for begin in range(0, updates * WINDOW, WINDOW):
        chosen = every[begin : begin + WINDOW]
        model.zero_grad()
        (alone(model, chosen) / sum(len(labels) for _, labels in chosen)).backward()
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p.sub_(p.grad)
    return {name: before[name] - p.detach() for name, p in model.named_parameters()}


def off(found: Tensor, truth: Tensor) -> float:
    """In the 2-norm, relative to the truth's."""
    return float((found.double() - truth.double()).norm() / truth.double().norm())
