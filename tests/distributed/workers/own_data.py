"""Run on 1 or 2 ranks, ASKED: answers of a folder's chats, and samples drawn by weight: what windows counted."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, WeightedRandomSampler

from distaccum import Accumulator, World
from distaccum.data.counter import GlobalCounter
from distaccum.data.datasets.labelled import prompts
from distaccum.data.factory import as_loader
from distaccum.losses.transformers import CausalLM
from tests.support.answers import asked, give
from tests.support.tokens import CHARACTERS


class Bigram(nn.Module):
    """The next character by the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(len(CHARACTERS), len(CHARACTERS))
        torch.nn.init.zeros_(self.table.weight)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.table(input_ids)


def chats(folder: str, micro: int) -> dict[str, Any]:
    """Windows of three chats in the order of the samples, by plain SGD."""
    data = prompts(path=f"{folder}/chats.jsonl", tokenizer=folder, messages="messages")
    model, loss = Bigram(), CausalLM()
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    acc = Accumulator(model, sgd, global_batch_size=3, micro_batch_size=micro, count=loss.count)
    windows = acc.windows(replace(data, shuffle=False))
    counts = [acc.step(window, loss).counts["loss"] for window in windows]
    samples = [sample["input_ids"].tolist() for sample in data.train]
    return {"counts": counts, "weights": model.table.weight.tolist(), "samples": samples}


def drawn(world: World, weights: list[float], micro: int, *, epoch: int = 0, start: int = 0) -> list[list[int]]:
    """The samples of each window until the end of the second epoch, of all ranks."""
    sampler = WeightedRandomSampler(weights, len(weights))
    data = DataLoader(list(range(len(weights))), batch_size=micro, sampler=sampler)  # type: ignore[arg-type]
    sizes: Any = {"global_batch_size": 8, "tokens": None, "micro_batch_size": micro}
    loader, found = as_loader(data, world, **sizes, seed=3), list[list[int]]()
    for number in range(epoch, 2):
        for window in loader.windows(number, start if number == epoch else 0, GlobalCounter(world, len)):
            own = [int(i) for one in window.micro_batches for i in one.batch]
            found.append(sorted(i for ranks in world.all_gather_object(own) for i in ranks))
    return found


def main(world: World) -> dict[str, Any]:
    folder, weights = asked()["folder"], asked()["weights"]
    whole = [drawn(world, weights, micro) for micro in (1, 3)]
    rest = [drawn(world, weights, 2, start=2), drawn(world, weights, 2, epoch=1, start=1)]
    return {"chats": [chats(folder, micro) for micro in (1, 3)], "drawn": whole, "resumed": rest}


if __name__ == "__main__":
    give(main)
