"""A loop of Accelerate; docs/own-loop.md changes it."""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from common import Net, collate, text
from torch.utils.data import DataLoader

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=8 // int(os.environ.get("WORLD_SIZE", "1")))

torch.manual_seed(0)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.99)
loader = DataLoader(text(), batch_size=8, collate_fn=collate)
model, optimizer, loader, scheduler = accelerator.prepare(net, optimizer, loader, scheduler)

for inputs, labels in loader:
    with accelerator.accumulate(model):
        logits = model(inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

accelerator.save_state("state")
if accelerator.is_main_process:
    torch.save(accelerator.unwrap_model(model).state_dict(), "weights.pt")
accelerator.end_training()
