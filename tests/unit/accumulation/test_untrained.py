"""Parameters that never get a gradient are named once, whatever the engine makes of them."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

from distaccum import Accumulator
from distaccum.accumulation.tracker import WINDOWS
from distaccum.config.engine import DDPConfig, EngineConfig, FSDP2Config
from distaccum.distributed.world import World
from distaccum.errors import UntrainedParameterWarning


class Forked(nn.Module):
    """The loss never sees ``spare``; ``detached`` gets a gradient of exactly zero."""

    def __init__(self, *, used: bool) -> None:
        super().__init__()
        self.body, self.spare, self.detached = (nn.Linear(3, 3) for _ in range(3))
        self.used = used

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.body(x) + (1.0 if self.used else 0.0) * self.detached(x)
        return found + self.spare(x) if self.used else found


def _train(world: World, engine: EngineConfig, *, used: bool, windows: int) -> None:
    model = Forked(used=used)
    acc = Accumulator(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        global_batch_size=2,
        micro_batch_size=2,
        count=len,
        world=world,
        engine=engine,
    )
    for window in acc.windows(list(torch.randn(2 * windows, 3))):
        for micro in window:
            with acc.accumulate():
                acc.backward(acc.model(micro.batch).square().sum())


@pytest.mark.parametrize("engine", [DDPConfig(find_unused_parameters=True), FSDP2Config()], ids=["ddp", "fsdp2"])
def test_parameters_that_never_get_a_gradient_are_named_once(gloo_world: World, engine: EngineConfig) -> None:
    with pytest.warns(
        UntrainedParameterWarning, match=r"detached.bias, detached.weight, spare.bias, spare.weight"
    ) as said:
        _train(gloo_world, engine, used=False, windows=2 * WINDOWS + 3)
    assert len([one for one in said if one.category is UntrainedParameterWarning]) == 1


def test_nothing_is_said_of_a_short_run_or_of_a_model_that_trains(gloo_world: World) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _train(gloo_world, FSDP2Config(), used=False, windows=WINDOWS)
        _train(gloo_world, DDPConfig(), used=True, windows=WINDOWS + 2)
