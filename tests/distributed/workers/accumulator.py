"""Run by torchrun: a global batch that changes, on uneven ranks: by engine the weights, whole and resumed; refusals."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from distaccum import Accumulator, World
from distaccum.config.engine import DeepSpeedConfig, EngineConfig, engine_config
from distaccum.data.spec import DataSpec
from distaccum.engines.state import whole_state
from distaccum.errors import DistaccumError
from tests.support.answers import give
from tests.support.resized import MICRO, SIZES, make_model, samples

DATA = DataSpec(train=samples(), eval_dataset=None, description="in order", shuffle=False)


def make(engine: EngineConfig, world: World, model: nn.Module) -> tuple[Accumulator, Any]:
    """An accumulator with a scheduler that takes a metric."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    plateau = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    sizes: Any = {"global_batch_size": SIZES[0], "micro_batch_size": MICRO, "verify": "never"}
    return Accumulator(model, optimizer, **sizes, count=len, scheduler=plateau, engine=engine, world=world), optimizer


def train(acc: Accumulator, begin: int, end: int) -> None:
    """The windows from ``begin`` up to ``end`` of the first epoch; each is of the size of its number."""
    k = begin
    for window in acc.windows(DATA):
        assert window.samples == SIZES[k]
        for micro in window:
            with acc.accumulate():
                acc.backward((acc.model(micro.batch) - 1).square().sum())
        k += 1
        acc.scheduler_step(k)  # never better: the rate falls after every window but the first
        if k < len(SIZES):
            acc.set_global_batch_size(SIZES[k])
        if k == end:
            break


def weights(acc: Accumulator) -> list[float]:
    model = whole_state(acc.engine, acc.world).model
    return [number for name in sorted(model) for number in model[name].flatten().tolist()]


def refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except DistaccumError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def run(name: str, world: World) -> dict[str, Any]:
    engine = DeepSpeedConfig(stage=2) if name == "deepspeed" else engine_config(name)
    whole, _ = make(engine, world, make_model())
    found: dict[str, Any] = {}
    found["sizes differ"] = refusal(lambda: whole.set_global_batch_size(4 + world.rank))
    found["one is wrong"] = refusal(lambda: whole.set_global_batch_size(4 if world.is_main else 1))
    found["metrics differ"] = refusal(lambda: whole.scheduler_step(float(world.rank)))
    train(whole, 0, len(SIZES))
    found["whole"] = weights(whole)
    if name == "deepspeed":
        return found
    first, _ = make(engine, world, make_model())
    train(first, 0, 2)
    state = first.state_dict()
    train(first, 2, 3)  # does not change the state
    resumed, _ = make(engine, world, make_model())
    resumed.load_state_dict(state)
    train(resumed, 2, len(SIZES))
    found["resumed"] = weights(resumed)
    model = resumed.engine.unwrapped_model
    (used,) = resumed.engine.optimizers
    resumed.close()
    if name == "zero1":
        second: Any = {"global_batch_size": 4, "micro_batch_size": 2, "engine": engine, "world": world}
        found["used optimizer"] = refusal(lambda: Accumulator(model, used, **second).close())
        make(engine, world, model)[0].close()  # the model with a new one
    return found


if __name__ == "__main__":
    give(lambda world: {name: run(name, world) for name in sys.argv[2:]})
