"""Ground truth: one process, fp64, each window's whole batch in one forward, plain autograd and a textbook optimizer.

Shares nothing with distaccum's planning, windows, engines or update; only the order of the samples (``Shuffle``, tested
on its own) and the user-side objects: model, data, schedule.
"""

import numpy as np
import torch
import torch.nn.functional as F

from distaccum.config.schema import RunConfig
from distaccum.data.plan.shuffle import Shuffle
from distaccum.train.components import components_from_config


def train(config: dict[str, object], steps: int) -> list[tuple[float, float]]:
    """``(loss, grad_norm)`` of the first ``steps`` windows."""
    settings = RunConfig.from_dict(config)
    parts = components_from_config(settings, world_size=1, device=torch.device("cpu"))
    model = parts.model.double().train()
    options = dict(settings.optim.optimizer)
    kind = {"torch.optim.AdamW": torch.optim.AdamW, "torch.optim.SGD": torch.optim.SGD}[options.pop("_target_")]
    optimizer = kind(model.parameters(), lr=settings.optim.lr, **(options | {"fused": False, "foreach": False}))
    samples, size = len(parts.data.train), settings.batch.global_size
    windows_per_epoch = int(np.ceil(samples / size))
    results = []
    for step in range(steps):
        epoch, k = divmod(step, windows_per_epoch)
        positions = np.arange(k * size, min((k + 1) * size, samples))
        ids = Shuffle(samples, seed=settings.seed, epoch=epoch)(positions)
        pairs = [parts.data.train[int(i)] for i in ids]
        inputs, labels = torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs])
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.optim.clip_norm or float("inf"))
        for group in optimizer.param_groups:
            group["lr"] = settings.optim.lr * parts.schedule(step)
        optimizer.step()
        results.append((loss.item(), norm.item()))
    return results
