"""Run by torchrun on 2 ranks: streams of unequal length. Writes, window by window, the samples and the gradient."""

import tempfile
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from distaccum import Accumulator, Trainer, World
from distaccum.train.callbacks import Callback
from tests.support.answers import give
from tests.support.runs import settings

GLOBAL_SIZE, MICRO_SIZE, WIDTH = 8, 2, 3
BATCHES = {"7 and 4": (7, 4), "5 and 0": (5, 0)}
Sample = dict[str, Tensor]


def sample(number: int) -> Sample:
    """The sample of this number, which is in it; it counts ``number % 3 + 1`` items."""
    generator = torch.Generator().manual_seed(number)
    return {"id": torch.tensor(number), "x": torch.randn(WIDTH, generator=generator)}


class Stream(IterableDataset[Sample]):
    """The samples of one rank: two a micro-batch, but one in the last."""

    def __init__(self, batches: int, rank: int) -> None:
        self.numbers = range(1000 * rank, 1000 * rank + max(0, 2 * batches - 1))

    def __iter__(self) -> Iterator[Sample]:
        return map(sample, self.numbers)


class Loss:
    """A sum of squares over a count that differs from sample to sample."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = [[]]

    def count(self, batch: Sample) -> float:
        return int((batch["id"] % 3 + 1).sum())

    def __call__(self, model: nn.Module, batch: Sample) -> Tensor:
        self.seen[-1] += batch["id"].tolist()
        return model(batch["x"]).square().sum()


class Recorder(Callback):
    """What a window took on all ranks, and its gradient."""

    def __init__(self, loss: Loss, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.loss, self.model, self.windows = loss, model, list[dict[str, Any]]()
        optimizer.register_step_pre_hook(self.on_step)

    def on_step(self, *_: Any) -> None:
        everyone: list[Any] = [None, None]
        torch.distributed.all_gather_object(everyone, self.loss.seen[-1])
        gradient = [p.grad.flatten().tolist() for p in self.model.parameters() if p.grad is not None]
        self.windows.append({"samples": everyone, "gradient": [*chain(*gradient)]})
        self.loss.seen.append([])


def make() -> tuple[nn.Module, torch.optim.Optimizer, Loss, Recorder]:
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, 1)
    optimizer, loss = torch.optim.SGD(model.parameters(), lr=1e-12), Loss()
    return model, optimizer, loss, Recorder(loss, model, optimizer)


def by_accumulator(stream: Stream, world: World, *, counted: bool) -> list[dict[str, Any]]:
    """Two epochs of a ``DataLoader`` of one's own; without ``counted`` each backward is given its count."""
    model, optimizer, loss, recorder = make()
    count = loss.count if counted else None
    acc = Accumulator(
        model, optimizer, global_batch_size=GLOBAL_SIZE, micro_batch_size=MICRO_SIZE, count=count, world=world
    )
    loader = DataLoader(stream, batch_size=MICRO_SIZE)
    for _ in range(2):
        for window in acc.windows(loader):
            for micro in window:
                with acc.accumulate():
                    acc.backward(loss(acc.model, micro.batch), loss.count(micro.batch))
    return recorder.windows


def by_trainer(stream: Stream, world: World) -> list[dict[str, Any]]:
    """Two epochs of the samples themselves."""
    model, optimizer, loss, recorder = make()
    trainer = {"max_steps": 1000, "max_epochs": 2, "verify": "never"}  # the loss notes the samples of each call
    config = settings((GLOBAL_SIZE, MICRO_SIZE), trainer, optim={"clip_norm": None}, schedule={})
    with tempfile.TemporaryDirectory() as folder:
        Trainer(model, loss, stream, optimizer=optimizer, config=config, run_dir=folder).fit()
        world.barrier()
    return recorder.windows


def main(world: World) -> dict[str, Any]:
    results = {}
    for name, batches in BATCHES.items():
        stream = Stream(batches[world.rank], world.rank)
        results[name] = {
            "accumulator": by_accumulator(stream, world, counted=True),
            "counted afterwards": by_accumulator(stream, world, counted=False),
            "trainer": by_trainer(stream, world),
        }
    return results


if __name__ == "__main__":
    give(main)
