"""Level 3, no loop: a small GPT on lines of unequal length.

``python launch/examples/trainer.py`` or ``torchrun --standalone --nproc-per-node=2 launch/examples/trainer.py``.
"""

from __future__ import annotations

import hashlib

import torch

from distaccum import Trainer
from distaccum.data.datasets.lines import lines
from distaccum.losses.cross_entropy import CrossEntropy
from distaccum.models.gpt import GPT
from distaccum.train.callbacks import EarlyStopping

torch.manual_seed(0)
model = GPT(vocab_size=256, seq_len=64, n_layer=2, n_head=2, n_embd=32, dropout=0.0)

trainer = Trainer(
    model,
    CrossEntropy(),
    lines(seq_len=64),
    {
        "batch": {"global_size": 64, "micro_size": 8},
        "optim": {"lr": 3e-3, "clip_norm": 1.0},
        "schedule": {"_target_": "distaccum.train.schedules.Constant"},
        "trainer": {"max_steps": 20, "log_every": 5, "eval_every": 10},
        "metrics": {"wandb": {"mode": "disabled"}},
    },
    optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3),
    callbacks=[EarlyStopping(metric="eval_loss", patience=3)],
)
trainer.fit()

weights = b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())
if trainer.is_main:
    print("weights", hashlib.sha256(weights).hexdigest())
