"""A rank of two that no launcher watches, NUMERICS ENGINE PLACE; rank 0 prints what its loop ends with.

Rank 1 ends in the last window: before its first ``forward``, or in its last ``backward``.
"""

import os
import sys
from datetime import timedelta

import torch
from torch import Tensor, nn
from torch.optim import SGD

from distaccum import Accumulator, World
from distaccum.distributed import world as world_module

WINDOWS, UNITS = 2, 2  # of each rank

if __name__ == "__main__":
    numerics, engine, place = sys.argv[1:]
    world_module.GROUP_TIMEOUT = timedelta(seconds=30)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    world, calls = World.join(), 0
    model = nn.Linear(3, 1)

    def loss_of(batch: Tensor) -> Tensor:
        """Its backward ends rank 1 at last."""
        global calls  # noqa: PLW0603  of a script
        calls += 1
        if world.rank and place == "forward" and calls == UNITS + 1:
            os._exit(9)
        total = acc.model(batch).square().sum()
        if world.rank and calls == WINDOWS * UNITS:
            total.register_hook(lambda _: os._exit(9))
        return total

    acc = Accumulator(
        model,
        SGD(model.parameters(), 1e-4),
        global_batch_size=2 * UNITS * 2,
        micro_batch_size=2,
        count=len,
        numerics=numerics,
        engine=engine,
        verify="never",
        world=world,
    )
    try:
        for window in acc.windows(list(torch.randn(WINDOWS * 2 * UNITS * 2, 3))):
            for micro in window:
                with acc.accumulate():
                    acc.backward(loss_of(micro.batch))
    except Exception as error:
        print(type(error).__name__, flush=True)
        os._exit(3)  # the group cannot be closed
