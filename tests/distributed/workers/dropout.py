"""Run by torchrun: the weights after two epochs with dropout, by engine, run through and resumed in between."""

import sys
from typing import Any

import torch
from torch import nn

from distaccum import Accumulator, World
from distaccum.config.engine import DeepSpeedConfig, EngineConfig, engine_config
from distaccum.engines.state import whole_state
from tests.support.accumulators import Loss
from tests.support.answers import give

SAMPLES, GLOBAL, MICRO = 48, 24, 2  # shares of 24, 12, 8 and 6 samples: the same micro-batches on 1, 2, 3 and 4 ranks
DATA: Any = list(torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(0)).unbind())


def make(engine: EngineConfig, world: World, seed: int) -> Accumulator:
    """An accumulator; ``seed`` is that of the rank's own generators, which nothing may depend on."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(seed + world.rank)
    sizes: Any = {"global_batch_size": GLOBAL, "micro_batch_size": MICRO, "verify": "never"}
    return Accumulator(model, optimizer, **sizes, count=Loss().count, engine=engine, seed=7, world=world)


def train(acc: Accumulator, windows: int) -> None:
    """So many windows: every other one micro-batch by micro-batch."""
    while True:
        for window in acc.windows(DATA):
            if windows % 2:
                acc.step(window, Loss())
            else:
                for micro in window:
                    torch.rand(acc.world.rank + 1)  # somebody else's numbers
                    with acc.accumulate():
                        acc.backward(Loss()(acc.model, micro.batch))
            windows -= 1
            if not windows:
                return


def weights(acc: Accumulator) -> list[float]:
    model = whole_state(acc.engine, acc.world).model
    return [number for name in sorted(model) for number in model[name].flatten().tolist()]


def main(world: World) -> dict[str, Any]:
    found = {}
    for name in sys.argv[2:]:
        engine = DeepSpeedConfig(stage=2) if name == "deepspeed" else engine_config(name)
        whole = make(engine, world, seed=100)
        train(whole, 4)
        found[name] = {"whole": weights(whole)}
        if name == "deepspeed":
            continue
        first = make(engine, world, seed=200)
        train(first, 3)
        second = make(engine, world, seed=300)
        second.load_state_dict(first.state_dict())
        train(second, 1)
        found[name]["resumed"] = weights(second)
    return found


if __name__ == "__main__":
    give(main)
