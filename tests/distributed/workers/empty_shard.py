"""Run by torchrun on 2 ranks, by engine: fewer samples than ranks, a stream that one rank has alone, empty streams."""

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from distaccum import DataSpec, World
from distaccum.errors import DistaccumError
from tests.distributed.workers.engine_matrix import weights_of
from tests.support.accumulators import over_sgd
from tests.support.answers import give
from tests.support.engine_matrix import ENGINES

FEATURES, LR, EPOCHS = 4, 0.1, 3
GLOBAL_SIZE = 4
HELD = {"one sample": (1, None), "a stream of rank 0": (3, 0), "a stream of rank 1": (3, 1), "no stream": (0, 0)}


def samples(number: int) -> list[Tensor]:
    return list(torch.randn(number, FEATURES, generator=torch.Generator().manual_seed(0)))


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Linear(FEATURES, 2))


class Stream(IterableDataset[Tensor]):
    """Samples on one rank, none on the others."""

    def __init__(self, held: list[Tensor]) -> None:
        self.held = held

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.held)


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    total: Tensor = model(batch).square().sum()
    return total


def trained(engine: str, world: World, number: int, holder: int | None) -> dict[str, Any]:
    """The weights after each epoch, or the error."""
    model = make_model()
    acc = over_sgd(model, LR, (GLOBAL_SIZE, 1), count=len, world=world, engine=ENGINES[engine], verify="never")
    held = samples(number)
    data: Any = DataSpec(train=held, eval_dataset=None, description="", shuffle=False)
    if holder is not None:
        data = DataLoader(Stream(held if world.rank == holder else []), batch_size=1)
    found: dict[str, Any] = {"weights": [], "error": ""}
    try:
        for _ in range(EPOCHS):
            for window in acc.windows(data):
                for micro in window:
                    with acc.accumulate():
                        acc.backward(loss(acc.model, micro.batch))
            weights = weights_of(acc.engine, world)
            found["weights"].append(torch.cat([weights[name].flatten() for name in sorted(weights)]).tolist())
    except DistaccumError as error:
        found["error"] = f"{type(error).__name__}: {error}"
    acc.close()
    return found


def expected(number: int) -> list[list[float]]:
    """The weights after each epoch of full batches: fp64, one process."""
    model, found = make_model().double(), []
    batch = torch.stack(samples(number)).double()
    for _ in range(EPOCHS):
        gradients = torch.autograd.grad(loss(model, batch) / number, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.sub_(LR * gradient)
        weights = {name: parameter.detach().flatten() for name, parameter in model.named_parameters()}
        found.append(torch.cat([weights[name] for name in sorted(weights)]).tolist())
    return found


def main(world: World) -> Any:
    return {engine: {name: trained(engine, world, *held) for name, held in HELD.items()} for engine in sys.argv[2:]}


if __name__ == "__main__":
    give(main, of_all=True)
