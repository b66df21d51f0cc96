"""Run by torchrun: one window's gradient in every number format and factorization of this world size.

``precision.py RESULT``: a file to write, with flat fp64 gradients by ``precision/reduce_dtype/accumulation``.
"""

from __future__ import annotations

import sys
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from distaccum import Accumulator, World
from distaccum.config.precision import PrecisionConfig
from distaccum.models.gpt import GPT

GLOBAL_SIZE, IGNORED, SEED = 32, -100, 3
ACCUMULATIONS = (1, 2, 8)
FORMATS = (("fp32", "fp32"), ("bf16", "fp32"), ("fp16", "fp32"), ("fp16", "fp16"), ("fp32", "bf16"), ("fp32", "fp16"))


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return GPT(vocab_size=32, seq_len=24, n_layer=2, n_head=2, n_embd=32, dropout=0.0)


def make_data() -> list[dict[str, Tensor]]:
    """One window of sequences of 2 to 24 tokens, padded."""
    generator = torch.Generator().manual_seed(2)
    samples = []
    for _ in range(GLOBAL_SIZE):
        inputs, labels = torch.randint(0, 32, (2, 24), generator=generator)
        labels[int(torch.randint(2, 25, (), generator=generator)) :] = IGNORED
        samples.append({"inputs": inputs, "labels": labels})
    return samples


class Tokens:
    """Cross entropy over the labels that are not ignored."""

    def count(self, batch: dict[str, Tensor]) -> float:
        return int((batch["labels"] != IGNORED).sum())

    def __call__(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(batch["inputs"]).flatten(0, 1).float()
        return F.cross_entropy(logits, batch["labels"].flatten(), ignore_index=IGNORED, reduction="sum")


def truth() -> Tensor:
    """fp64, one process, the whole window, plain autograd."""
    model, samples = make_model().double(), make_data()
    inputs, labels = (torch.stack([sample[key] for sample in samples]) for key in ("inputs", "labels"))
    F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten(), ignore_index=IGNORED).backward()
    return _flat(model)


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])


def gradient(precision: PrecisionConfig, micro_batch_size: int, world: World) -> Tensor:
    model, found = make_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, fused=False)
    optimizer.register_step_pre_hook(lambda *_: found.append(_flat(model)))
    loss, data = Tokens(), make_data()
    sizes: Any = {"global_batch_size": GLOBAL_SIZE, "micro_batch_size": micro_batch_size, "seed": SEED}
    acc = Accumulator(model, optimizer, count=loss.count, precision=precision, world=world, **sizes)
    for window in acc.windows(data):
        acc.step(window, loss)
    (only,) = found
    return only


if __name__ == "__main__":
    world = World.join()
    results = {}
    for (name, reduce_dtype), accumulation in product(FORMATS, ACCUMULATIONS):
        precision = PrecisionConfig(name=name, reduce_dtype=reduce_dtype)
        found = gradient(precision, GLOBAL_SIZE // (world.size * accumulation), world)
        everyone = [torch.empty_like(found) for _ in range(world.size)]
        torch.distributed.all_gather(everyone, found)
        assert all(torch.equal(found, other) for other in everyone)  # bit by bit the same on every rank
        results[f"{name}/{reduce_dtype}/{accumulation}"] = found
    if world.is_main:
        save_file(results, sys.argv[1])
