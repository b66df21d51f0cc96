"""A loss that gathers others' outputs over gloo, in even windows or refused uneven ones; ``full``: memory runs out."""

import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distaccum import Accumulator, all_gather
from distaccum.errors import MisuseError


def _loss(model: Any, batch: Tensor) -> Tensor:
    y = model(batch)
    others = [torch.empty_like(y) for _ in range(dist.get_world_size())]
    dist.all_gather(others, y.detach())
    total: Tensor = (y - torch.cat(others).mean()).square().sum()
    return total


class _Full:
    """The loss of a rank that has no memory left: its forward may not begin again, for the others would not follow."""

    @staticmethod
    def count(batch: Tensor) -> int:
        return len(batch)

    def __call__(self, model: Any, batch: Tensor) -> Tensor:
        total = _loss(model, batch)
        if dist.get_rank() == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return total


def run_out_of_memory() -> None:
    """Its error ends every rank."""
    model, data = nn.Linear(4, 1), list(torch.randn(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sizes = {"global_batch_size": 8, "micro_batch_size": 2}
    acc = Accumulator(model, optimizer, **sizes, count=len, engine=sys.argv[1], verify="never")
    for window in acc.windows(data):
        acc.step(window, _Full())


def main() -> None:
    torch.manual_seed(0)
    if "full" in sys.argv:
        run_out_of_memory()
        return
    data = list(torch.randn(12, 4))
    found: dict[str, Any] = {}
    for size, samples in ((4, 8), (6, 9), (5, 12)):
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        acc = Accumulator(model, optimizer, global_batch_size=size, micro_batch_size=1, count=len, engine=sys.argv[1])
        try:
            for window in acc.windows(data[:samples]):
                before = model.weight.detach().clone()
                for micro in window:
                    with acc.accumulate():
                        acc.backward(_loss(acc.model, micro.batch))
            found[str(size)] = acc.progress.step
        except MisuseError as error:
            found[str(size)] = [str(error), bool(torch.equal(model.weight, before))]
            acc.abandon()
    x, weights = torch.randn(2, 3, 4, requires_grad=True), torch.randn(2, 2, 4, 6)  # alike on both ranks
    (torch.cat(all_gather(x), 1).transpose(1, 2).contiguous() * weights[acc.world.rank]).sum().backward()
    own = slice(3 * acc.world.rank, 3 * acc.world.rank + 3)
    found["gathered"] = float((x.grad - weights.sum(0).transpose(1, 2)[:, own]).abs().max())
    try:
        all_gather(torch.randn(2 + acc.world.rank, 3))
    except MisuseError as error:
        found["unlike"] = str(error)
    os.write(1, f"rank {acc.world.rank}: {json.dumps(found)}\n".encode())  # in one piece: both ranks write to one file


if __name__ == "__main__":
    main()
