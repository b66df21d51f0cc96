"""Losses as people write them, each beside plain torch on the whole batch in fp64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, one_hot
from torch.optim import SGD

from distaccum import Accumulator
from distaccum.distributed.world import World

WEIGHT = torch.tensor([1.0, 2.0, 0.5])
Give = Callable[[Accumulator, Tensor, Tensor], None]
Mean = Callable[[nn.Module, Tensor, Tensor], Tensor]


def _data() -> list[tuple[Tensor, Tensor]]:
    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    return [(row, row[:3].argmax()) for row in x]


def _focal(logits: Tensor, labels: Tensor) -> Tensor:
    losses = cross_entropy(logits, labels, reduction="none")
    return (1 - (-losses).exp()) ** 2 * losses


def _norm(model: nn.Module) -> Tensor:
    return torch.stack([p.square().sum() for p in model.parameters()]).sum()


def _kept(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """A constant where nothing is left, as people write it."""
    logits, keep = model(x), y != 0
    return cross_entropy(logits[keep], y[keep], reduction="sum") if keep.any() else torch.zeros(())


def _by_name(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    logits = model(x)
    return {"a": cross_entropy(logits, y, reduction="sum"), "b": logits[y == 0].square().sum()}


def _with_norm(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    return {"a": cross_entropy(model(x), y, reduction="sum"), "p": _norm(model)}


def _plain(model: nn.Module, x: Tensor, y: Tensor, **options: Any) -> Tensor:
    return cross_entropy(model(x), y, **options)


def _double(y: Tensor) -> Tensor:
    return one_hot(y, 3).double()


def _unignored(batch: Any) -> int:
    return int((batch[1] != 0).sum())


PROGRAMS: dict[str, tuple[Callable[[Any], Any] | None, Give, Mean]] = {
    "a sum": (lambda b: len(b[1]), lambda a, x, y: a.backward(_plain(a.model, x, y, reduction="sum")), _plain),
    "a mean, NumPy's count": (
        None,
        lambda a, x, y: a.backward(_plain(a.model, x, y), np.int32(len(y)), reduction="mean"),  # type: ignore[arg-type]
        _plain,
    ),
    "a mean, a count of one element": (
        None,
        lambda a, x, y: a.backward(_plain(a.model, x, y), torch.tensor([len(y)]), reduction="mean"),
        _plain,
    ),
    "weights of classes": (
        lambda b: WEIGHT[b[1]].sum().numpy(),
        lambda a, x, y: a.backward(_plain(a.model, x, y, weight=WEIGHT), reduction="mean"),
        lambda m, x, y: _plain(m, x, y, weight=WEIGHT.double()),
    ),
    "two counts": (
        lambda b: {"a": len(b[1]), "b": int((b[1] == 0).sum())},
        lambda a, x, y: a.backward(_by_name(a.model, x, y)),
        lambda m, x, y: _plain(m, x, y) + m(x)[y == 0].square().sum() / (y == 0).sum(),
    ),
    "a penalty of the weights": (
        lambda b: {"a": len(b[1]), "p": 1},
        lambda a, x, y: a.backward(_with_norm(a.model, x, y)),
        lambda m, x, y: _plain(m, x, y) + _norm(m),
    ),
    "label smoothing": (
        lambda b: len(b[1]),
        lambda a, x, y: a.backward(_plain(a.model, x, y, label_smoothing=0.1, reduction="sum")),
        lambda m, x, y: _plain(m, x, y, label_smoothing=0.1),
    ),
    "focal": (
        lambda b: len(b[1]),
        lambda a, x, y: a.backward(_focal(a.model(x), y).sum()),
        lambda m, x, y: _focal(m(x), y).mean(),
    ),
    "a mean over nothing": (
        _unignored,
        lambda a, x, y: a.backward(_plain(a.model, x, y, ignore_index=0), reduction="mean"),
        lambda m, x, y: _plain(m, x, y, ignore_index=0),
    ),
    "a constant for nothing": (
        _unignored,
        lambda a, x, y: a.backward(_kept(a.model, x, y)),
        lambda m, x, y: _plain(m, x, y, ignore_index=0),
    ),
    "several labels": (
        lambda b: 3 * len(b[1]),
        lambda a, x, y: a.backward(
            binary_cross_entropy_with_logits(a.model(x), one_hot(y, 3).float()), reduction="mean"
        ),
        lambda m, x, y: binary_cross_entropy_with_logits(m(x), _double(y)),
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_loss_trains_as_that_of_the_whole_batch(name: str, gloo_world: World) -> None:
    count, give, mean = PROGRAMS[name]
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    reference = copy.deepcopy(model).double()
    step = SGD(reference.parameters(), lr=0.05)
    accumulator = Accumulator(
        model, SGD(model.parameters(), lr=0.05), global_batch_size=8, micro_batch_size=3, count=count, world=gloo_world
    )
    for window in accumulator.windows(_data()):
        seen = []
        for micro in window:
            with accumulator.accumulate():
                give(accumulator, *micro.batch)
            seen.append(micro.batch)
        step.zero_grad()
        mean(reference, torch.cat([x for x, _ in seen]).double(), torch.cat([y for _, y in seen])).backward()
        step.step()
        for own, expected in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(own.double(), expected, rtol=1e-6, atol=1e-6)
