"""A run whose global batch changes with every window, and the same one in plain torch: fp64, one process."""

from typing import Any

import torch
from torch import Tensor, nn

MICRO = 2
SIZES = (5, 9, 3, 2, 4)  # samples of the windows of one epoch


def samples() -> Any:
    return list(torch.randn(sum(SIZES), 6, generator=torch.Generator().manual_seed(0)).unbind())


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def oracle() -> list[float]:
    """The weights after the epoch, by name; the learning rate is halved after every window but the first."""
    model, data, begin = make_model().double(), torch.stack(samples()).double(), 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for k, size in enumerate(SIZES):
        batch: Tensor = data[begin : begin + size]
        optimizer.zero_grad()
        ((model(batch) - 1).square().sum() / size).backward()
        optimizer.step()
        begin += size
        optimizer.param_groups[0]["lr"] *= 0.5 if k else 1.0
    state = model.state_dict()
    return [number for name in sorted(state) for number in state[name].flatten().tolist()]
