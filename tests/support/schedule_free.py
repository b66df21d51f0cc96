"""A schedule-free optimizer: A. Defazio et al., "The Road Less Scheduled" (2024)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class ScheduleFree(torch.optim.Optimizer):
    """The schedule-free SGD of the paper, with the modes of its authors' package."""

    def __init__(self, params: Any, lr: float, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "train_mode": False})

    @torch.no_grad()
    def _move(self, weight: float) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if "z" in self.state[p]:
                    p.lerp_(self.state[p]["z"], weight)

    def train(self) -> None:
        """From the averages to the weights that train."""
        if not self.param_groups[0]["train_mode"]:
            self._move(1 - self.param_groups[0]["beta"])
        self.param_groups[0]["train_mode"] = True

    def eval(self) -> None:
        if self.param_groups[0]["train_mode"]:
            self._move(1 - 1 / self.param_groups[0]["beta"])
        self.param_groups[0]["train_mode"] = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Only in the mode that trains."""
        (group,) = self.param_groups
        assert group["train_mode"], "not in train mode"
        group["k"] += 1
        for p in group["params"]:
            z = self.state[p].setdefault("z", p.detach().clone())
            x = p.lerp(z, 1 - 1 / group["beta"])
            z.sub_(group["lr"] * p.grad)
            x.lerp_(z, 1 / group["k"])
            p.copy_(x.lerp(z, 1 - group["beta"]))


def averaged(model: nn.Module, loss: Callable[..., Tensor], data: list[Tensor], windows: int) -> nn.Module:
    """The model with the weights to evaluate after so many windows of 4 samples, by plain torch at a rate of 0.1."""
    optimizer = ScheduleFree(model.parameters(), lr=0.1)
    optimizer.train()
    for k in range(windows):
        optimizer.zero_grad()
        (loss(model, torch.stack(data[4 * k : 4 * k + 4])) / 4).backward()
        optimizer.step()
    optimizer.eval()
    return model
