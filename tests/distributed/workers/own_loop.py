"""A loop as docs/own-loop.md has it, of 36 steps in the folder ``RUN_DIR``: ``own_loop.py [SECONDS of a step]``."""

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

from distaccum import Accumulator, StopSignals

folder, seconds = Path(os.environ["RUN_DIR"]), float(sys.argv[1]) if len(sys.argv) > 1 else 0.0
torch.manual_seed(0)
data = list(torch.randn(96, 6).unbind())
model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.1), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
acc = Accumulator(model, optimizer, global_batch_size=8, micro_batch_size=2, count=len)
step = acc.resume(folder)
if acc.world.is_main:
    print("from step", step, "on", acc.world.size, flush=True)
with StopSignals() as signals:
    for _ in range(acc.progress.epoch, 3):
        for window in acc.windows(data):
            acc.step(window, lambda model, batch: (model(batch) - 1).square().sum())
            time.sleep(seconds)
            if acc.progress.step == step + 5:
                acc.save(folder)
                folder.joinpath("begun").touch()
            if signals.received:
                acc.stop()
acc.save(folder)
