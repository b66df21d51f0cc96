"""A usual hand-written loop, without distaccum: is its gradient the global batch's?

It divides each micro-batch's mean by the accumulation steps, as tutorials do. ``docs/tools.md`` audits it, without an
edit: ``torchrun ... -m distaccum audit launch/examples/handwritten_ddp.py --loss distaccum:CrossEntropy``
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from distaccum.data.datasets.lines import lines
from distaccum.models.gpt import GPT

ACCUMULATION_STEPS = 4


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = lines(seq_len=64)  # lines of text: their lengths differ
    loader = DataLoader(
        data.train,
        batch_size=4,
        sampler=DistributedSampler(data.train, shuffle=True),
        collate_fn=data.collate,
        drop_last=True,
    )
    model = DistributedDataParallel(GPT(vocab_size=256, seq_len=64, n_layer=1, n_head=2, n_embd=32, dropout=0.1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step, (inputs, labels) in enumerate(loader, start=1):
        at_boundary = step % ACCUMULATION_STEPS == 0
        with nullcontext() if at_boundary else model.no_sync():
            logits = model(inputs)
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
            (loss / ACCUMULATION_STEPS).backward()
        if at_boundary:
            optimizer.step()
            optimizer.zero_grad()
        if step == 10 * ACCUMULATION_STEPS:
            break
    if dist.get_rank() == 0:
        print(f"loss of the last micro-batch {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
