"""Losses that compare the samples of a window, their models and data, and the truth: fp64, one process, whole batches.

The truth shares with distaccum what a user brings, and the order of the samples (``Shuffle``, tested on its own).
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import default_collate

from distaccum.data.plan.shuffle import Shuffle
from distaccum.losses.contrastive import InfoNCE

FEATURES, WIDTH, SEED = 6, 5, 3
EXPERTS = 4
Batch = Mapping[str, Tensor]


class Towers(nn.Module):
    """Two encoders and a learned scale: ``(B, FEATURES)`` twice to ``(B, WIDTH)`` twice, and the scale, ``(1,)``."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, WIDTH))
        self.text = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, WIDTH))
        self.log_scale = nn.Parameter(torch.tensor([1.5]))

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.image(image), self.text(text), self.log_scale.exp()


class MixtureOfExperts(nn.Module):
    """A regression by the likeliest expert: ``(B, FEATURES)`` to ``(B,)``, and the router's probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(FEATURES, EXPERTS)
        self.experts = nn.Linear(FEATURES, EXPERTS)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        likely = self.router(x).softmax(-1)
        best = likely.argmax(-1, keepdim=True)
        return (self.experts(x) * likely).gather(-1, best).squeeze(-1), likely


class Balanced:
    """Squared errors of targets above 0, and how evenly a window's tokens are dealt to experts: E * sum(f_e * P_e).

    Source: W. Fedus, B. Zoph, N. Shazeer, "Switch Transformers" (2021), equations 4 to 6.
    """

    def count(self, batch: Batch) -> dict[str, float]:
        return {"task": int((batch["y"] > 0).sum()), "balance": len(batch["x"])}

    def represent(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        found, likely = model(batch["x"])
        dealt = F.one_hot(likely.argmax(-1), EXPERTS).sum(0)
        return {
            "task": (found - batch["y"]).square()[batch["y"] > 0].sum().reshape(1),
            "likely": likely.sum(0, keepdim=True),
            "dealt": dealt.reshape(1, EXPERTS),
        }

    def __call__(self, representations: Mapping[str, Tensor]) -> dict[str, Tensor]:
        dealt, likely = representations["dealt"].sum(0), representations["likely"].sum(0)
        tokens = dealt.sum()
        balance = EXPERTS * (dealt / tokens * likely / tokens).sum()
        return {"task": representations["task"].sum(), "balance": 0.5 * balance * tokens}


class Contrast(InfoNCE):
    """Of batches that hold more than the two inputs."""

    def represent(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        return super().represent(model, (batch["x"], batch["twin"]))


class Sampled(Contrast):
    """Leaves every other negative out by chance, the same ones on every rank."""

    def _logits(self, representations: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        logits, right = super()._logits(representations)
        left_out = (torch.rand(logits.shape) < 0.5) & ~torch.eye(len(logits), dtype=torch.bool)
        return logits.masked_fill(left_out, -torch.inf), right


class ByMicroBatch:
    """What plain accumulation makes of such a loss: each micro-batch is compared with itself."""

    def __init__(self, loss: Any) -> None:
        self._loss, self.count = loss, loss.count

    def __call__(self, model: nn.Module, batch: Batch) -> Any:
        return self._loss(self._loss.represent(model, batch))


LOSSES: dict[str, Any] = {"contrast": Contrast, "balanced": Balanced}
RANDOM: dict[str, Any] = {"sampled": Sampled}  # without a truth of their own


def make_model(loss: str, dtype: torch.dtype = torch.float64, dropout: float = 0.0) -> nn.Module:
    """The same weights at every call."""
    torch.manual_seed(1)
    return (MixtureOfExperts() if loss == "balanced" else Towers(dropout)).to(dtype)


def samples(size: int, dtype: torch.dtype = torch.float64) -> list[Batch]:
    """The same at every call; the first features say much of which expert is likely."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(size, FEATURES, generator=generator, dtype=torch.float64)
    twin = 0.7 * x + 0.5 * torch.randn(size, FEATURES, generator=generator, dtype=torch.float64)
    y = x.prod(1) + x[:, 0]
    return [{"x": a.to(dtype), "twin": b.to(dtype), "y": c.to(dtype)} for a, b, c in zip(x, twin, y, strict=True)]


def windows(size: int, global_size: int) -> list[Batch]:
    """The whole batches of an epoch, in the order of seed :data:`SEED`."""
    data, order = samples(size), Shuffle(size, seed=SEED, epoch=0)(np.arange(size))
    return [default_collate([data[int(i)] for i in order[k : k + global_size]]) for k in range(0, size, global_size)]


def mean(loss: Any, model: nn.Module, batch: Batch) -> Tensor:
    """The mean loss of a whole batch, by plain autograd."""
    sums, counts = loss(loss.represent(model, batch)), loss.count(batch)
    if isinstance(sums, Tensor):
        return sums / counts
    return torch.stack([sums[name] / (counts[name] or torch.inf) for name in sums]).sum()


def truth(name: str, size: int, global_size: int) -> list[Tensor]:
    """The gradient of each window at the same weights, flat."""
    loss, model, found = LOSSES[name](), make_model(name), []
    for batch in windows(size, global_size):
        gradients = torch.autograd.grad(mean(loss, model, batch), list(model.parameters()))
        found.append(torch.cat([gradient.flatten() for gradient in gradients]))
    return found


def gradient_at(name: str, weights: Mapping[str, Tensor], batch: Batch) -> tuple[dict[str, Tensor], float]:
    """The gradient of the mean loss of a whole batch at these weights, by name, and that loss: in fp64."""
    model = make_model(name)
    model.load_state_dict({key: tensor.double() for key, tensor in weights.items()})
    total = mean((LOSSES | RANDOM)[name](), model, batch)
    found = torch.autograd.grad(total, list(model.parameters()))
    return dict(zip((key for key, _ in model.named_parameters()), found, strict=True)), total.item()


def error_by_name(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The relative error of a gradient, in the 2-norm."""
    off = sum(float((found[key].double() - gradient).square().sum()) for key, gradient in expected.items())
    return (off / sum(float(gradient.square().sum()) for gradient in expected.values())) ** 0.5
