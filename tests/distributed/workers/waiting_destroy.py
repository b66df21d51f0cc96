"""Run as ``trainer ARGUMENTS...`` or ``loop``: rank 1 fails where a group's end waits for others, as in NCCL."""

import sys
from time import sleep
from typing import Any

import torch
import torch.distributed as dist

_destroy = dist.destroy_process_group


def destroy(group: Any = None) -> None:
    """Waits until each rank is here, which none is that waits for this one in a collective."""
    store, size = dist.distributed_c10d._get_default_store(), dist.get_world_size()  # type: ignore[attr-defined]
    store.add("destroyed", 1)
    while store.add("destroyed", 0) < size:
        sleep(0.05)
    _destroy(group)


dist.destroy_process_group = destroy


def loop() -> None:
    """Level 2: rank 1 raises before its second window."""
    from distaccum import Accumulator  # noqa: PLC0415

    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    acc = Accumulator(model, optimizer, global_batch_size=4, micro_batch_size=1, count=len)
    data = [torch.ones(2) for _ in range(16)]
    for window in acc.windows(data):
        if acc.progress.step == 1 and acc.world.rank == 1:
            raise OSError("the disk of rank 1 is gone")
        for batch in window:
            with acc.accumulate():
                acc.backward(acc.model(batch.batch).sum())


if __name__ == "__main__":
    how, *sys.argv[1:] = sys.argv[1:]
    if how == "loop":
        loop()
    else:
        from distaccum.train.__main__ import main

        main()
