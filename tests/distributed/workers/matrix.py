"""Run by torchrun: computes the gradients of the asked cells, and writes each one's relative error."""

import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from distaccum import Accumulator, DataSpec, Trainer, World
from distaccum import functional as da
from tests.support import matrix
from tests.support.answers import asked, give
from tests.support.matrix import GLOBAL_SIZE, SEED, Cell
from tests.support.runs import settings


def by_hand(cell: Cell, model: nn.Module, optimizer: Any, world: World) -> None:
    loss = matrix.LOSSES[cell.loss]()
    windows = da.plan_windows(
        loader(cell), world, global_batch_size=GLOBAL_SIZE, micro_batch_size=cell.micro, count=loss.count, seed=SEED
    )
    engine = da.create_engine(model, optimizer, world)
    for window in windows(0):
        for i, micro in enumerate(window.micro_batches):
            with engine.micro_step(sync=i == len(window.micro_batches) - 1):
                total = loss(engine.model, micro.batch)
                engine.backward(
                    da.normalize_loss(total, window.counts, gradient_divide_factor=engine.gradient_divide_factor)
                )
        da.finish_step(engine, window)


def by_accumulator(cell: Cell, model: nn.Module, optimizer: Any, world: World) -> None:
    loss = matrix.LOSSES[cell.loss]()
    acc = Accumulator(
        model,
        optimizer,
        global_batch_size=GLOBAL_SIZE,
        micro_batch_size=cell.micro,
        count=loss.count,
        seed=SEED,
        world=world,
    )
    for window in acc.windows(loader(cell)):
        for micro in window:
            with acc.accumulate():
                acc.backward(loss(acc.model, micro.batch))


def by_trainer(cell: Cell, model: nn.Module, optimizer: Any, world: World) -> None:
    source = DataSpec(train=matrix.make_data(cell), eval_dataset=None, description="matrix", collate=matrix.collate)
    trainer = {"max_steps": None, "max_epochs": 1, "log_every": 1000}
    config = settings((GLOBAL_SIZE, cell.micro), trainer, seed=SEED, optim={"clip_norm": None}, schedule={})
    with tempfile.TemporaryDirectory() as folder:
        Trainer(model, matrix.LOSSES[cell.loss](), source, optimizer=optimizer, config=config, run_dir=folder).fit()
        world.barrier()


def loader(cell: Cell) -> DataLoader[Any]:
    samples: Any = matrix.make_data(cell)
    return DataLoader(samples, batch_size=cell.micro, shuffle=True, collate_fn=matrix.collate)


def gradients(cell: Cell, world: World) -> list[Tensor]:
    """What the optimizer is given, window after window; the weights stay as they are."""
    model, found = matrix.make_model(cell.dtype), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.register_step_pre_hook(
        lambda *_: found.append(torch.cat([p.grad.flatten().clone() for p in model.parameters()]))  # type: ignore[union-attr]
    )
    {1: by_hand, 2: by_accumulator, 3: by_trainer}[cell.level](cell, model, optimizer, world)
    return found


def main(world: World) -> list[float]:
    errors = []
    for values in asked():
        cell = Cell(**values)
        assert cell.world == world.size
        found = gradients(cell, world)
        errors.append(matrix.error(found, matrix.truth(cell)))
    everyone = torch.tensor(errors)
    torch.distributed.all_reduce(everyone, op=torch.distributed.ReduceOp.MAX)  # every rank must hold the gradient
    return everyone.tolist()


if __name__ == "__main__":
    give(main)
