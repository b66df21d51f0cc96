"""Run by torchrun on 2 ranks: ``stateful.py FOLDER KIND STEPS RESUME`` trains on a stream, or goes on."""

import sys
from collections.abc import Iterator
from typing import Any

import datasets
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from distaccum import DataSpec, Trainer, World
from tests.support.accumulators import Loss
from tests.support.runs import settings

SAMPLES = (21, 13)  # of each rank


def collate(samples: list[dict[str, Any]]) -> Tensor:
    return torch.stack([torch.as_tensor(sample["x"], dtype=torch.float32) for sample in samples])


class Numbers(IterableDataset[dict[str, Any]]):
    """Another order every epoch, so that an epoch that starts in the wrong place shows."""

    def __init__(self, rank: int) -> None:
        self.rank, self.epoch = rank, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        generator = torch.Generator().manual_seed(10 * self.epoch + self.rank)
        for _ in range(SAMPLES[self.rank]):
            yield {"x": torch.randn(3, generator=generator)}


def stream(kind: str, rank: int) -> Any:
    if kind == "torchdata":
        return StatefulDataLoader(Numbers(rank), batch_size=2, collate_fn=collate)
    if kind == "workers":
        return StatefulDataLoader(Numbers(rank), batch_size=2, collate_fn=collate, num_workers=1)
    if kind.startswith("datasets"):  # unsplit: every rank names the whole of it
        rows = [{"x": torch.randn(3, generator=torch.Generator().manual_seed(i)).tolist()} for i in range(sum(SAMPLES))]
        rows = datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=4)
        return rows.shuffle(seed=1, buffer_size=5) if kind == "datasets-shuffled" else rows
    if kind == "loader":
        return DataLoader(Numbers(rank), batch_size=2, collate_fn=collate)
    return Numbers(rank)


if __name__ == "__main__":
    folder, kinds, steps, resume = sys.argv[1:]
    world = World.join()
    for kind in kinds.split(","):
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        optim = {"optimizer": {"_target_": "torch.optim.AdamW"}}
        config = settings((8, 2), {"max_steps": int(steps), "log_every": 1}, save=3, optim=optim, resume=resume)
        source = DataSpec(train=stream(kind, world.rank), eval_dataset=None, description=kind, collate=collate)
        Trainer(model, Loss(), source, config=config, run_dir=f"{folder}/{kind}").fit()
