"""What an optimizer is given, where its rule calls its parent's step."""

import logging
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from distaccum import Accumulator, World
from tests.support.accumulators import SQUARED_ERRORS


class Halved(SGD):
    """Halves its gradients before its parent's steps."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for _ in range(2):
            torch._foreach_mul_([p.grad for group in self.param_groups for p in group["params"]], 0.5)
            super().step()


def test_only_the_outermost_step_is_looked_at(gloo_world: World, caplog: pytest.LogCaptureFixture) -> None:
    SGD([nn.Parameter(torch.zeros(1))], lr=0.1)  # from here on torch runs hooks in Halved's super().step()
    torch.manual_seed(1)
    model, x, y = nn.Linear(3, 1).double(), torch.randn(8, 3).double(), torch.randn(8, 1).double()
    plain = deepcopy(model)
    optimizer, own = Halved(model.parameters(), lr=0.1), Halved(plain.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: None)
    settings: Any = {"global_batch_size": 8, "micro_batch_size": 4, "count": SQUARED_ERRORS.count}
    acc = Accumulator(model, optimizer, **settings, world=gloo_world)
    with caplog.at_level(logging.INFO):
        for window in acc.windows(list(zip(x, y, strict=True))):
            acc.step(window, SQUARED_ERRORS)
    ((plain(x) - y).square().sum() / 8).backward()
    own.step()
    assert "the optimizer is given it" in caplog.text
    for p, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, expected, rtol=1e-6, atol=0)
