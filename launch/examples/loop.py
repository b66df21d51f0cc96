"""Level 1, helpers in a hand-written loop: a small GPT on lines of unequal length.

``python launch/examples/loop.py`` or ``torchrun --standalone --nproc-per-node=2 launch/examples/loop.py``.
"""

from __future__ import annotations

import hashlib

import torch
from torch.utils.data import DataLoader

from distaccum import World
from distaccum import functional as da
from distaccum.data.datasets.lines import lines
from distaccum.models.gpt import GPT

world = World.join()  # the processes that torchrun started; without torchrun, this one
torch.manual_seed(0)
data = lines(seq_len=64)
model = GPT(vocab_size=256, seq_len=64, n_layer=2, n_head=2, n_embd=32, dropout=0.0)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

loader = DataLoader(data.train, batch_size=8, shuffle=True, collate_fn=data.collate)
windows = da.plan_windows(
    loader, world, global_batch_size=64, micro_batch_size=8, count=lambda batch: da.count_labels(batch[1])
)
engine = da.create_engine(model, optimizer, world, clip_norm=1.0)

for step, window in enumerate(windows(0), start=1):
    engine.begin_window(len(window.micro_batches))  # needed when the forward is a collective
    for i, micro in enumerate(window.micro_batches):
        with engine.micro_step(sync=i == len(window.micro_batches) - 1):
            inputs, labels = da.to_device(micro.batch, world.device)
            total, _ = da.cross_entropy(engine.model(inputs), labels)
            engine.backward(
                da.normalize_loss(total, window.counts, gradient_divide_factor=engine.gradient_divide_factor)
            )
    result = da.finish_step(engine, window)
    if world.is_main and step % 5 == 0:  # the norm is read from the device: not in every step
        print(f"step {step}: {window.counts['loss']:.0f} tokens, gradient norm {result.grad_norm.item():.3f}")
    if step == 20:
        break

weights = b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())
if world.is_main:
    print("weights", hashlib.sha256(weights).hexdigest())
