"""The oracle matrix: its cells, their data, model and losses, and the fp64 whole-batch truth.

The truth shares nothing with distaccum's planning, windows, engines or updates; only the order of the samples
(``Shuffle``, tested on its own) and what a user brings: model, data, the formula of the loss.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distaccum.data.plan.shuffle import Shuffle
from distaccum.losses.base import from_mean

GLOBAL_SIZE = 24
SEED = 3
VOCABULARY, PADDING, IGNORED = 11, 0, -100
AXES: dict[str, tuple[Any, ...]] = {
    "world": (1, 2, 3, 4),
    "micro": (1, 3, 8, GLOBAL_SIZE),
    "data": ("full", "ragged", "unequal", "nothing", "zero"),
    "level": (1, 2, 3),
    "loss": ("tokens", "weighted", "two"),
    "dtype": ("float32", "float64"),
}
TOLERANCE = {"float32": 1e-6, "float64": 1e-12}
Batch = Mapping[str, Tensor]
Point = TypeVar("Point")


@dataclass(frozen=True)
class Cell:
    """One point of the matrix."""

    world: int
    micro: int
    data: str
    level: int
    loss: str
    dtype: str


def every_cell() -> list[Cell]:
    return [Cell(*values) for values in product(*AXES.values())]


def covering_set() -> list[Cell]:
    """Few cells in which every two values of every two axes meet: greedily, so always the same ones."""

    def pairs(cell: Cell) -> set[Any]:
        return set(combinations(vars(cell).items(), 2))

    return covering(every_cell(), pairs)


def covering(points: Sequence[Point], pairs: Callable[[Point], set[Any]]) -> list[Point]:
    """The points that together have all pairs, greedily."""
    wanted = set().union(*map(pairs, points))
    chosen = []
    while wanted:
        best = max(points, key=lambda point: len(pairs(point) & wanted))
        chosen.append(best)
        wanted -= pairs(best)
    return chosen


class Model(nn.Module):
    """Token logits ``(B, T, V)``, and one score a sample, ``(B,)``, which padding does not change."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.hidden = nn.Embedding(VOCABULARY, 8), nn.Linear(8, 8)
        self.logits, self.score = nn.Linear(8, VOCABULARY), nn.Linear(8, 1)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.hidden(self.embed(inputs)))
        real = (inputs != PADDING).unsqueeze(-1)
        pooled = (hidden * real).sum(1) / real.sum(1)
        return self.logits(hidden), self.score(pooled).squeeze(-1)


def make_model(dtype: str) -> Model:
    """The same fp32 weights in every cell, in its number format."""
    torch.manual_seed(1)
    return Model().to(getattr(torch, dtype))


def make_data(cell: Cell) -> list[dict[str, Tensor]]:
    size = {"full": 48, "nothing": GLOBAL_SIZE + 1}.get(cell.data, 43)
    generator = torch.Generator().manual_seed(2)
    samples = []
    for _ in range(size):
        length = 6 if cell.data in ("full", "ragged") else int(torch.randint(1, 10, (), generator=generator))
        inputs = torch.randint(1, VOCABULARY, (length,), generator=generator)
        labels = torch.randint(0, VOCABULARY, (length,), generator=generator)
        target, weight = torch.randn((), generator=generator), torch.rand((), generator=generator)
        samples.append({"inputs": inputs, "labels": labels, "target": target, "weight": weight})
    if cell.data == "zero":  # in the first window the last rank's share counts nothing
        share = GLOBAL_SIZE * (cell.world - 1) // cell.world if cell.world > 1 else GLOBAL_SIZE // 2
        for position in range(share, GLOBAL_SIZE):
            sample = samples[int(Shuffle(size, seed=SEED, epoch=0)(np.array([position]))[0])]
            sample["labels"] = torch.full_like(sample["labels"], IGNORED)
            sample["weight"] = torch.zeros(())
    return samples


def collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    fill = {"inputs": PADDING, "labels": IGNORED}
    return {
        key: nn.utils.rnn.pad_sequence([sample[key] for sample in samples], True, fill[key])
        if key in fill
        else torch.stack([sample[key] for sample in samples])
        for key in samples[0]
    }


class Tokens:
    """A mean over tokens, as a model of others may return it, made a sum."""

    def count(self, batch: Batch) -> float:
        return int((batch["labels"] != IGNORED).sum())

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        logits, score = model(batch["inputs"])
        mean = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED)
        return from_mean(mean, self.count(batch)) + 0.0 * score.sum()


class Weighted:
    """A sum of weighted squares, over the sum of the weights."""

    def count(self, batch: Batch) -> float:
        return float(batch["weight"].sum(dtype=torch.float64))

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        logits, score = model(batch["inputs"])
        return (batch["weight"] * (score - batch["target"]).square()).sum() + 0.0 * logits.sum()


class Two:
    """Tokens and samples, each over its own count."""

    def count(self, batch: Batch) -> dict[str, float]:
        return {"language": Tokens().count(batch), "value": len(batch["target"])}

    def __call__(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        logits, score = model(batch["inputs"])
        labels = batch["labels"].flatten()
        language = F.cross_entropy(logits.flatten(0, 1), labels, ignore_index=IGNORED, reduction="sum")
        return {"language": language, "value": 0.5 * (score - batch["target"]).square().sum()}


LOSSES: dict[str, Any] = {"tokens": Tokens, "weighted": Weighted, "two": Two}


def truth(cell: Cell) -> list[Tensor]:
    """The gradient of each window of the first epoch: fp64, one process, the whole batch, flat."""
    model, samples = make_model("float32").double(), make_data(cell)
    order = Shuffle(len(samples), seed=SEED, epoch=0)(np.arange(len(samples)))
    gradients = []
    for begin in range(0, len(samples), GLOBAL_SIZE):
        window = collate([samples[int(i)] for i in order[begin : begin + GLOBAL_SIZE]])
        logits, score = model(window["inputs"])
        labels, target, weight = window["labels"].flatten(), window["target"].double(), window["weight"].double()
        tokens = F.cross_entropy(logits.flatten(0, 1), labels, ignore_index=IGNORED)
        loss = {
            "tokens": tokens,
            "weighted": (weight * (score - target).square()).sum() / weight.sum(),
            "two": tokens + 0.5 * (score - target).square().mean(),
        }[cell.loss]
        found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        parts = [torch.zeros_like(p) if g is None else g for p, g in zip(model.parameters(), found, strict=True)]
        gradients.append(torch.cat([part.flatten() for part in parts]))
    return gradients


def error(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest relative error of a window's gradient, in the 2-norm; infinite if there are more or fewer windows."""
    if len(found) != len(expected):
        return float("inf")
    return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True))
