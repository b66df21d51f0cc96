"""Run on 2 ranks: loops whose gradients or parameters are sharded, each right once and wrong once, by :data:`KINDS`."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from distaccum import audit
from tests.support.audit_loops import STEPS, TokenModel, count, loss_sum, mean, micro_batches, tokens_of, told, total

WINDOWS = 2


def _fsdp2(divide: bool) -> Any:
    """``fully_shard``, which averages over the ranks as DDP does; reduces in the last micro-step only."""
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415

    model: Any = _model()
    fully_shard(model.body)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    batches = micro_batches(dist.get_rank(), WINDOWS * STEPS, even=not divide)

    def run() -> None:
        for at in range(0, len(batches), STEPS):
            window = batches[at : at + STEPS]
            tokens = tokens_of(window)
            for i, batch in enumerate(window):
                model.set_requires_gradient_sync(i == STEPS - 1)
                logits = model(batch["input_ids"])
                loss = total(logits, batch["labels"]) * dist.get_world_size() / tokens
                (loss if divide else mean(logits, batch["labels"])).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
            optimizer.step()
            optimizer.zero_grad()

    return model, batches, run


def _deepspeed(stage: int) -> Callable[[bool], Any]:
    def make(divide: bool) -> Any:
        os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed  # noqa: PLC0415

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        config = {
            "train_micro_batch_size_per_gpu": 3,
            "gradient_accumulation_steps": STEPS,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
        }
        model = _model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        batches = micro_batches(dist.get_rank(), WINDOWS * STEPS, even=not divide)

        def run() -> None:
            for at in range(0, len(batches), STEPS):
                window = batches[at : at + STEPS]
                tokens = tokens_of(window)
                for batch in window:
                    logits = engine(batch["input_ids"])
                    loss = total(logits, batch["labels"]) * dist.get_world_size() * STEPS / tokens
                    engine.backward(loss if divide else mean(logits, batch["labels"]) / STEPS)
                    engine.step()

        return engine, batches, run

    return make


def _model() -> nn.Module:
    torch.manual_seed(0)
    return TokenModel()


KINDS: dict[str, Callable[[bool], Any]] = {"fsdp2": _fsdp2}
KINDS |= {f"deepspeed-{stage}": _deepspeed(stage) for stage in range(4)}


def main() -> None:
    result, *names = sys.argv[1:]
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    for name in names:
        for divide in (True, False):
            model, batches, run = KINDS[name](divide)
            with audit(model, loss_sum=loss_sum, count=count, batches=batches, show=lambda report: None) as report:
                run()
            found[f"{name}, {'right' if divide else 'wrong'}"] = told(report)
    if dist.get_rank() == 0:
        Path(result).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
