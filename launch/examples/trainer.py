"""Level 3, no loop: a small GPT on lines of unequal length.

``python launch/examples/trainer.py`` or ``torchrun --standalone --nproc-per-node=2 launch/examples/trainer.py``.
"""

from __future__ import annotations

import hashlib

import torch

from distaccum import CrossEntropy, EarlyStopping, MetricsConfig, RunConfig, Trainer, TrainerConfig, WandbConfig
from distaccum.data.datasets.lines import lines
from distaccum.models.gpt import GPT

torch.manual_seed(0)
model = GPT(vocab_size=256, seq_len=64, n_layer=2, n_head=2, n_embd=32, dropout=0.0)

trainer = Trainer(
    model,
    CrossEntropy(),
    lines(seq_len=64),
    global_batch_size=64,
    micro_batch_size=8,
    max_steps=20,
    clip_norm=1.0,
    optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3),
    callbacks=[EarlyStopping(metric="eval_loss", patience=3)],
    config=RunConfig(
        schedule={"_target_": "distaccum.train.schedules.Constant"},
        trainer=TrainerConfig(log_every=5, eval_every=10),
        metrics=MetricsConfig(wandb=WandbConfig(mode="disabled")),
    ),
)
trainer.fit()

weights = b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())
if trainer.is_main:
    print("weights", hashlib.sha256(weights).hexdigest())
