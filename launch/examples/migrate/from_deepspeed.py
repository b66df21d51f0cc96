"""A loop of DeepSpeed's own engine, under torchrun or ``deepspeed``; docs/own-loop.md changes it."""

from __future__ import annotations

import os

import deepspeed
import torch
import torch.nn.functional as F
from common import Net, collate, text
from torch.utils.data import DataLoader, DistributedSampler

world = int(os.environ["WORLD_SIZE"])
settings = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 8 // world,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 1},
}

deepspeed.init_distributed("gloo")
torch.manual_seed(0)
net = Net()
optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.99)
engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, lr_scheduler=scheduler, config=settings)
data = text()
loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data, shuffle=False), collate_fn=collate)

for inputs, labels in loader:
    logits = engine(inputs)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    engine.backward(loss)
    engine.step()

engine.save_checkpoint("state")
if engine.global_rank == 0:
    torch.save(net.state_dict(), "weights.pt")
engine.destroy()
