"""Optimizer state on one rank each: the same weights as with all of it on every rank, bit by bit."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, Optimizer

from distaccum import Accumulator, DataSpec, World
from tests.distributed.workers.fsdp2 import Make, Model, samples
from tests.support.accumulators import SQUARED_ERRORS
from tests.support.threads import run_ranks

GLOBAL_SIZE, WINDOWS = 6, 5


def one(kind: Any, **options: Any) -> tuple[nn.Module, list[Optimizer]]:
    torch.manual_seed(3)
    model = Model(16)
    return model, [kind(model.parameters(), **options)]


def several(fused: bool) -> tuple[nn.Module, list[Optimizer]]:
    """Two optimizers, one of groups with settings of their own."""
    model, _ = one(SGD)
    groups = [{"params": model.blocks[0].parameters()}, {"params": model.blocks[1].parameters(), "weight_decay": 0.5}]
    rest = [*model.blocks[2].parameters(), *model.enter.parameters(), *model.leave.parameters()]
    return model, [AdamW(groups, lr=0.05, fused=fused), SGD(rest, lr=0.02, momentum=0.9, fused=fused)]


def few() -> tuple[nn.Module, list[Optimizer]]:
    """An optimizer of one parameter, of which every rank but one steps none."""
    model, _ = one(SGD)
    first, *rest = model.parameters()
    return model, [AdamW([first], lr=0.05, fused=True), AdamW(rest, lr=0.05)]


def frozen() -> tuple[nn.Module, list[Optimizer]]:
    """Some of what the optimizer holds is not trained."""
    model, optimizers = one(AdamW, lr=0.05, fused=True)
    for parameter in (*model.enter.parameters(), *model.blocks[1].parameters()):
        parameter.requires_grad_(False)
    return model, optimizers


MODELS: dict[str, Make] = {
    "AdamW": partial(one, AdamW, lr=0.05, fused=False, foreach=False),
    "AdamW, foreach": partial(one, AdamW, lr=0.05, foreach=True),
    "AdamW, fused": partial(one, AdamW, lr=0.05, fused=True),
    "AdamW, amsgrad": partial(one, AdamW, lr=0.05, amsgrad=True),
    "SGD with momentum": partial(one, SGD, lr=0.05, momentum=0.9),
    "SGD with momentum, fused": partial(one, SGD, lr=0.05, momentum=0.9, dampening=0.3, fused=True),
    "Adafactor": partial(one, Adafactor, lr=0.05),
    "several": partial(several, False),
    "several, fused": partial(several, True),
    "few": few,
    "frozen": frozen,
}


def size_of(optimizers: Iterable[Optimizer]) -> int:
    states = (state for optimizer in optimizers for state in optimizer.state.values())
    return sum(value.nbytes for state in states for value in state.values() if isinstance(value, Tensor))


def trained(made: Any, engine: str, options: dict[str, Any], world: World) -> tuple[list[Tensor], int, list[int]]:
    """An epoch: the weights after each window, and the bytes and the parameters that optimizers have state of."""
    model, optimizers = made[world.rank]
    sizes: Any = {"global_batch_size": GLOBAL_SIZE, "micro_batch_size": 1, "count": SQUARED_ERRORS.count}
    acc = Accumulator(model, optimizers, world=world, engine=engine, **sizes, **options)
    data: Any = samples(GLOBAL_SIZE * WINDOWS - 5)  # the last window is of one sample
    weights = []
    for window in acc.windows(DataSpec(train=data, eval_dataset=None, description="", shuffle=False)):
        acc.step(window, SQUARED_ERRORS)
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    return weights, size_of(optimizers), [len(optimizer.state) for optimizer in optimizers]


OFTEN = ("AdamW, fused", "several", "few")


@pytest.mark.parametrize(
    ("ranks", "clip"),
    [
        (2, {"clip_norm": 0.3}),
        *(pytest.param(*one, marks=pytest.mark.heavy) for one in ((2, {}), (4, {"clip_norm": 0.3}))),
    ],
)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.heavy) for name in MODELS]
)
def test_every_optimizer_steps_as_without_sharding_and_its_state_is_held_once(
    name: str, clip: dict[str, float], ranks: int
) -> None:
    of: dict[str, Any] = {}
    for engine in ("ddp", "zero1"):  # made outside of the threads, which share the random numbers
        of[engine] = run_ranks(ranks, partial(trained, [MODELS[name]() for _ in range(ranks)], engine, clip))
    expected, whole, held = of["ddp"][0]
    for weights, _, _ in of["zero1"]:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(weights, expected, strict=True))
    assert {size for _, size, _ in of["ddp"]} == {whole}
    assert whole > 0
    shares = [size for _, size, _ in of["zero1"]]
    assert sum(shares) == whole
    assert [sum(counts) for counts in zip(*(own for _, _, own in of["zero1"]), strict=True)] == held
    if name.startswith("AdamW"):  # what is dealt out are whole tensors
        sizes = [p.numel() for p in Model(16).parameters()]
        assert max(shares) <= whole * (1 / ranks + max(sizes) / sum(sizes))
    if name == "few":
        assert sorted(own[0] for _, _, own in of["zero1"]) == [0] * (ranks - 1) + [1]
