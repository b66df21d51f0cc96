"""Level 2, the ``accumulate()`` context: a small GPT on lines of unequal length.

``python launch/examples/accumulate.py`` or ``torchrun --standalone --nproc-per-node=2 launch/examples/accumulate.py``.
"""

from __future__ import annotations

import hashlib

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from distaccum import Accumulator
from distaccum.data.datasets.lines import lines
from distaccum.functional import count_labels
from distaccum.models.gpt import GPT

torch.manual_seed(0)
data = lines(seq_len=64)
model = GPT(vocab_size=256, seq_len=64, n_layer=2, n_head=2, n_embd=32, dropout=0.0)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

loader = DataLoader(data.train, batch_size=8, shuffle=True, collate_fn=data.collate)
acc = Accumulator(
    model,
    optimizer,
    global_batch_size=64,
    micro_batch_size=8,
    clip_norm=1.0,
    count=lambda batch: count_labels(batch[1]),
)

for window in acc.windows(loader):
    for micro in window:
        with acc.accumulate():
            inputs, labels = micro.batch
            logits = acc.model(inputs)
            total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
            acc.backward(total)
    step = acc.progress.step
    if step % 5 == 0:
        loss = acc.mean_loss()  # over all ranks: every rank asks
        if acc.world.is_main:
            print(f"step {step}: {window.counts['loss']:.0f} tokens, loss {loss:.3f}")
    if step == 20:
        break

weights = b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())
if acc.world.is_main:
    print("weights", hashlib.sha256(weights).hexdigest())
