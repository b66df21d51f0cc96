"""Run by torchrun: trains on packed documents in cells ``[engine, positions, updates]``, and writes their errors."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD

from distaccum import Accumulator, CrossEntropy, World
from distaccum.config.batch import BatchConfig
from distaccum.train.packing import check_model, pack
from tests.distributed.workers.engine_matrix import weights_of
from tests.support.answers import asked, give
from tests.support.engine_matrix import ENGINES
from tests.support.packing import WINDOW, descend, make_model, off, spec


def change(engine: str, positions: str, updates: int, world: World) -> Tensor:
    """Of the weights, by updates of SGD at a rate of 1; micro-batches are of two documents, and ranks have 2 and 1."""
    model, loss = make_model(positions), CrossEntropy()
    data = pack(spec(), BatchConfig(packing="documents"), loss)
    check_model(model, data)
    sizes: Any = {"global_batch_size": WINDOW, "micro_batch_size": 2}
    optimizer = SGD(model.parameters(), lr=1.0)
    acc = Accumulator(model, optimizer, engine=ENGINES[engine], world=world, count=loss.count, **sizes)
    before = weights_of(acc.engine, world)
    for window in acc.windows(data):
        assert acc.step(window, loss).applied
        if acc.progress.step == updates:
            break
    after = weights_of(acc.engine, world)
    acc.close()
    return torch.cat([(before[name] - after[name]).flatten() for name in make_names(positions)])


def make_names(positions: str) -> list[str]:
    return [name for name, _ in make_model(positions).named_parameters()]


def errors(engine: str, positions: str, updates: int, world: World) -> tuple[float, float, float]:
    """Of the engine and of a plain loop in fp32, to fp64; and between the two."""

    def flat(changes: dict[str, Tensor]) -> Tensor:
        return torch.cat([changes[name].flatten() for name in make_names(positions)])

    truth = flat(descend(make_model(positions).double(), updates))
    plain = flat(descend(make_model(positions), updates))
    found = change(engine, positions, updates, world)
    return off(found, truth), off(plain, truth), off(found, plain)


if __name__ == "__main__":
    give(lambda world: [errors(*cell, world) for cell in asked()])
