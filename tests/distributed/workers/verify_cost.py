"""Run by torchrun: what proofs and comparisons of replicas cost a small GPT, by mode, in counts that do not vary."""

import logging
from typing import Any

import torch

from distaccum import Accumulator, CrossEntropy, World
from distaccum.data.hooks import Hooks
from distaccum.models.gpt import GPT
from distaccum.testing.counters import OperationCounter
from tests.support.answers import give

STEPS = 8  # micro-batches of a window on each rank
KINDS = ("aten ops", "gradient reductions", "other reductions", "other bytes", "other collectives")
MODES = {"first": ("first", True), "never": ("never", True), "plain": ("never", False)}


def counts(world: World, verify: str, *, riding: bool, windows: int) -> dict[str, Any]:
    """Of the first window, and of those after it; without ``riding`` replicas are not compared either."""
    torch.manual_seed(0)
    model, loss = GPT(vocab_size=64, seq_len=16, n_layer=4, n_head=2, n_embd=32, dropout=0.0), CrossEntropy()
    size = STEPS * world.size
    tokens = torch.randint(64, (size * (windows + 1), 17), generator=torch.Generator().manual_seed(1))
    acc = Accumulator(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        global_batch_size=size,
        micro_batch_size=1,
        count=loss.count,
        clip_norm=1.0,
        world=world,
        verify=verify,
    )
    if not riding:
        acc._counter.hooks = Hooks()
    found: dict[str, Any] = {}
    each = acc.windows([(row[:-1], row[1:]) for row in tokens])
    for name, number in (("first window", 1), ("later windows", windows)):
        with OperationCounter() as counted:
            for _ in range(number):
                acc.step(next(each), loss)
        found[name] = {kind: counted.counts[kind] for kind in KINDS}
    buckets = {p.grad.untyped_storage().data_ptr() for p in model.parameters() if p.grad is not None}
    return found | {"every": acc.replicas.every, "buckets": len(buckets)}


def main(world: World) -> dict[str, Any]:
    logging.getLogger("distaccum").setLevel(logging.ERROR)
    every = counts(world, "never", riding=True, windows=1)["every"]
    return {mode: counts(world, verify, riding=riding, windows=every) for mode, (verify, riding) in MODES.items()}


if __name__ == "__main__":
    give(main)
