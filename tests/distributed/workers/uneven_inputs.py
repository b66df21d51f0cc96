"""Run by torchrun, perhaps ``spoiled``: uneven ranks where a forward is a collective, beside the first engine."""

import sys
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from distaccum import Accumulator, World
from distaccum.accumulation.step import Outcome
from distaccum.config.engine import DDPConfig, EngineConfig, FSDP2Config, Zero1Config
from distaccum.engines.state import whole_state
from distaccum.errors import DistaccumError
from tests.support.accumulators import over_sgd
from tests.support.answers import give

ENGINES: dict[str, EngineConfig] = {
    "ddp": DDPConfig(find_unused_parameters=True),
    "boundary": FSDP2Config(),
    "every": FSDP2Config(sync="every"),
}
WIDTH = 4


class Block(nn.Module):
    """A residual layer with dropout."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.layer(x)))


class Model(nn.Module):
    """With a layer that no loss uses."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.blocks = nn.ModuleList([Block(dropout), Block(dropout)])
        self.head, self.second = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).squeeze(-1)


class Stream:
    """This rank's micro-batches; with a NaN in one of them."""

    def __init__(self, sizes: list[int], nan_at: int | None = None) -> None:
        self._sizes, self._nan_at = sizes, nan_at

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(WORLD.rank)
        for i, size in enumerate(self._sizes):
            x, y = torch.randn(size, WIDTH, generator=generator), torch.randn(size, generator=generator)
            yield (x * torch.nan if i == self._nan_at else x), y


def accumulator(engine: EngineConfig, model: nn.Module, **options: Any) -> Accumulator:
    """Windows of eight samples, in micro-batches of two; SGD."""
    return over_sgd(model, 0.1, (8, 2), engine=engine, world=WORLD, count=lambda batch: len(batch[1]), **options)


def spoiled(engine: EngineConfig) -> list[Any]:
    """With a sample that is skipped: applied or not, and the norm, window by window."""
    torch.manual_seed(1)
    acc = accumulator(engine, Model(), nonfinite="skip")
    stream = Stream(sizes(7, 3), nan_at=2 if WORLD.rank else None)
    return [[last.applied, last.grad_norm.item()] for last in trained(acc, stream)]


def sizes(most: int, least: int) -> list[int]:
    """Full micro-batches, so many on the last rank and so many on others."""
    return [2] * (least if WORLD.rank == WORLD.size - 1 else most)


def trained(acc: Accumulator, stream: Stream) -> Iterator[Outcome]:
    for window in acc.windows(stream):
        for micro in window:
            with acc.accumulate():
                acc.backward((acc.model(micro.batch[0]) - micro.batch[1]).square().sum())
        assert acc.last is not None
        yield acc.last


def resumed(engine: EngineConfig) -> Any:
    """With dropout, uninterrupted and from a state in between: the last norms."""
    torch.manual_seed(1)
    acc = accumulator(engine, Model(dropout=0.5))
    torch.manual_seed(10 + WORLD.rank)
    norms: list[Any] = []
    state: Any = None
    for last in trained(acc, Stream(sizes(11, 4))):
        norms.append(last.grad_norm.item())
        if len(norms) == 2:
            state = deepcopy(acc.state_dict())
    again = accumulator(engine, Model(dropout=0.5))
    again.load_state_dict(state)  # no generator's state: random numbers are keyed by the micro-batch
    return [norms[2:], [last.grad_norm.item() for last in trained(again, Stream(sizes(11, 4)))]]


def buffers(engine: EngineConfig) -> dict[str, list[float]]:
    """Those that a checkpoint has, and rank 0's own."""
    torch.manual_seed(1)
    acc = accumulator(engine, Model())
    list(trained(acc, Stream([2] * 4)))
    saved = whole_state(acc.engine, WORLD).model
    own = dict(acc.engine.unwrapped_model.named_buffers())
    return {name: [saved[name].sum().item(), value.sum().item()] for name, value in own.items()}


class Counting(torch.optim.SGD):
    """Counts its steps in its groups, as some do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return super().step(closure)


def counted(engine: EngineConfig) -> list[Any]:
    """What is left of the counts after a save, and of a setting that is this run's own."""
    found = []
    for decay in (0.0, 0.5):
        model = Model()
        optimizer = Counting(model.parameters(), lr=0.1, weight_decay=decay)
        sizes: Any = {"global_batch_size": 8, "micro_batch_size": 2, "count": lambda batch: len(batch[1])}
        acc = Accumulator(model, optimizer, engine=engine, world=WORLD, **sizes)
        if found:
            acc.load_state_dict(found[0])
            return [optimizer.param_groups[0].get("k"), optimizer.param_groups[0]["weight_decay"]]
        list(trained(acc, Stream([2] * 4)))
        found.append(acc.state_dict())
    raise AssertionError


def alone(engine: EngineConfig) -> str:
    """What is said to a rank of which another one calls the model between two windows."""
    torch.manual_seed(1)
    acc = accumulator(engine, Model())
    try:
        for _ in trained(acc, Stream([2] * 8)):
            if not WORLD.is_main:
                with torch.no_grad():
                    acc.model(torch.ones(2, WIDTH))
    except DistaccumError as error:
        return str(error)
    return ""


def main(_: World) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if sys.argv[2:] == ["spoiled"]:
        return {name: spoiled(engine) for name, engine in ENGINES.items()}
    for name, engine in ENGINES.items():
        found[name] = {"resumed": resumed(engine), "buffers": buffers(engine), "counted": counted(engine)}
    found["boundary"]["alone"] = alone(ENGINES["boundary"])
    found["zero1"] = {"counted": counted(Zero1Config(find_unused_parameters=True))}
    return found


WORLD = World.join()

if __name__ == "__main__":
    give(main)
