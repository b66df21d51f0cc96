"""A loop written by hand, on one process or under torchrun; docs/own-loop.md changes it."""

from __future__ import annotations

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import Net, collate, text
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

launched = "RANK" in os.environ
if launched:
    dist.init_process_group("gloo")
accumulation_steps = 8 // (dist.get_world_size() if launched else 1)

torch.manual_seed(0)
net = Net()
model = DistributedDataParallel(net) if launched else net
optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.99)
data = text()
sampler = DistributedSampler(data, shuffle=False) if launched else None
loader = DataLoader(data, batch_size=8, sampler=sampler, collate_fn=collate)

for i, (inputs, labels) in enumerate(loader):
    boundary = (i + 1) % accumulation_steps == 0
    with model.no_sync() if launched and not boundary else nullcontext():
        logits = model(inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        (loss / accumulation_steps).backward()
    if boundary:
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

if not launched or dist.get_rank() == 0:
    torch.save(net.state_dict(), "weights.pt")
if launched:
    dist.destroy_process_group()
