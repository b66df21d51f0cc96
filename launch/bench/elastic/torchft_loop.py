"""The same model, data and batch in a loop of torchft's: a replica group of one process.

It runs in an environment that has torchft, which distaccum's need not have. A step's data are chosen by the number of
the step and the group's number: a step that torchft drops is made again from the same samples, and none are left out.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn

from distaccum.data.datasets.digits import digits
from distaccum.models.cnn import CNN
from launch.bench.elastic.notes import note_step, note_unit


def main(lighthouse: str, folder: Path, group: int, groups: int, *sizes: int) -> None:
    """Trains until it is killed.

    Args:
        lighthouse: the address of torchft's server.
        folder: where steps and micro-batches are noted.
        group: the number of this replica group, of ``groups``.
        groups: how many there are when all are well.
        sizes: samples of a step, over all groups, and of a micro-batch; channels of the model.
    """
    batch, micro, channels = sizes
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # noqa: PLC0415  as torchft
    from torchft import Manager, Optimizer, ProcessGroupGloo  # type: ignore[import-not-found]  # noqa: PLC0415

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = CNN(channels=channels, classes=10)
    data: Any = digits(held_out=0.1986).train
    plain = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        plain.load_state_dict(state["optimizer"])

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=30)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": plain.state_dict()},
        min_replica_size=1,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"group-{group}",
        hostname="localhost",
        init_sync=False,
    )
    optimizer, share = Optimizer(manager, plain), batch // groups
    while True:
        step = manager.current_step()
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(step))[:batch]
        optimizer.zero_grad()
        for begin in range(group * share, (group + 1) * share, micro):
            ids = order[begin : begin + micro].tolist()
            images, labels = (torch.stack(part) for part in zip(*(data[i] for i in ids), strict=True))
            note_unit(folder, f"{step} ".encode() + images.numpy().tobytes())
            (nn.functional.cross_entropy(model(images), labels, reduction="sum") / share).backward()  # type: ignore[no-untyped-call]
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        manager.allreduce(flat).wait()
        for gradient, reduced in zip(gradients, torch.split(flat, [g.numel() for g in gradients]), strict=True):
            gradient.copy_(reduced.view_as(gradient))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if manager.current_step() > step and manager.participating_rank() == 0:
            note_step(folder, manager.current_step(), manager.num_participants())


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:8]))
