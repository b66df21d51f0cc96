"""Run by torchrun on 2 ranks: weights that one rank changes past the engine. Writes what every rank says, by case.

``replicas.py RESULT``: a JSON file to write.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from distaccum import World
from distaccum.data.hooks import Hooks
from distaccum.errors import DistaccumError
from distaccum.testing.counters import OperationCounter
from tests.support.accumulators import Loss, over_sgd
from tests.support.answers import give

MICRO_SIZE, STEPS, GLOBAL_SIZE = 1, 16, 32  # sixteen micro-batches on each rank: compared every second window


def make_model() -> nn.Module:
    torch.manual_seed(1)
    layers = [layer for _ in range(8) for layer in (nn.Linear(4, 4), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(4, 2))


def data() -> list[Tensor]:
    return list(torch.randn(4 * GLOBAL_SIZE, 4, generator=torch.Generator().manual_seed(0)))


def flip_a_bit(model: nn.Module) -> None:
    model[4].weight.data.view(torch.int32)[0, 0] ^= 1  # type: ignore[union-attr,operator,index]


def fill_a_bias(model: nn.Module) -> None:
    nn.init.ones_(model[2].bias)  # type: ignore[arg-type]


def train(world: World, spoil: Callable[[nn.Module], None] | None, **options: Any) -> dict[str, Any]:
    """An own loop; rank 1 spoils its weights after window 2."""
    model, loss = make_model(), Loss()
    nn.init.zeros_(model[2].bias)  # type: ignore[arg-type]
    acc = over_sgd(model, 0.01, (GLOBAL_SIZE, MICRO_SIZE), count=loss.count, world=world, **options)
    number, said = 0, ""
    try:
        for _ in range(2):
            for window in acc.windows(data()):
                acc.step(window, loss)
                number += 1
                if number == 2 and spoil is not None and world.rank == 1:
                    spoil(acc.engine.unwrapped_model)
    except DistaccumError as error:
        said = str(error)
    return {"said": said, "windows": number, "every": acc.replicas.every}


def operators(world: World, *, riding: bool) -> int:
    """Of two steady windows, one of which compares the weights."""
    model, loss = make_model(), Loss()
    acc = over_sgd(model, 0.01, (GLOBAL_SIZE, MICRO_SIZE), count=loss.count, world=world)
    if not riding:
        acc._counter.hooks = Hooks()
    windows = acc.windows(data())
    for _ in range(2):
        acc.step(next(windows), loss)
    with OperationCounter() as counted:
        for _ in range(2):
            acc.step(next(windows), loss)
    return counted.counts["aten ops"]


if __name__ == "__main__":
    joined = World.join()
    logging.getLogger("distaccum").setLevel(logging.ERROR)
    found: dict[str, Any] = {}
    cases: dict[str, tuple[Any, dict[str, Any]]] = {
        "clean": (None, {}),
        "a flipped bit": (flip_a_bit, {}),
        "a bias of ones": (fill_a_bias, {}),
        "warn": (flip_a_bit, {"on_divergence": "warn"}),
    }
    for name, (spoil, options) in cases.items():
        found[name] = joined.all_gather_object(train(joined, spoil, **options))
    counted = [operators(joined, riding=riding) for riding in (True, False)]
    found["operators"] = joined.all_gather_object(counted)
    give(found, joined)
