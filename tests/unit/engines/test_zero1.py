"""Optimizer state dealt out over ranks: which ones, where there is one process."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from distaccum.distributed.world import World
from distaccum.engines.ddp.zero1 import ZeRO1
from distaccum.engines.factory import create_engine

SIZES = ((40, 30), (30,), (1, 1), (7, 11), (500,), (3, 3, 3), (90, 2))


def _model() -> nn.ParameterList:
    torch.manual_seed(0)
    return nn.ParameterList([nn.Parameter(torch.randn(size)) for size in SIZES])


def _dealt(ranks: int, **options: float) -> list[list[int]]:
    """By rank, which of the parameters it steps: computed for each rank as if it were that one."""
    found = []
    for rank in range(ranks):
        model = _model()
        numbers = {id(parameter): i for i, parameter in enumerate(model)}
        optimizer = AdamW(model.parameters(), **options)
        ZeRO1(World(rank=rank, size=ranks, device=torch.device("cpu"))).partition([optimizer])
        found.append([numbers[id(p)] for group in optimizer.param_groups for p in group["params"]])
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_every_parameter_is_stepped_by_one_rank(ranks: int) -> None:
    dealt = _dealt(ranks)
    assert sorted(number for own in dealt for number in own) == [*range(len(SIZES))]
    assert all(own == sorted(own) for own in dealt)  # in the model's order


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_no_rank_has_more_than_the_largest_parameter_above_another(ranks: int) -> None:
    numels = [torch.Size(size).numel() for size in SIZES]
    loads = sorted(sum(numels[number] for number in own) for own in _dealt(ranks))
    assert all(after - before <= max(numels) for before, after in pairwise(loads))
    assert loads[-1] <= max(*numels, sum(numels) / ranks + max(numels[1:]))


def test_weights_keep_their_values_and_shapes_in_one_stretch_of_memory() -> None:
    model = _model()
    before = [p.detach().clone() for p in model]
    optimizer = AdamW(model.parameters())
    ZeRO1(World(rank=0, size=2, device=torch.device("cpu"))).partition([optimizer])
    assert all(torch.equal(p, value) and p.shape == value.shape for p, value in zip(model, before, strict=True))
    assert len({p.untyped_storage().data_ptr() for p in model}) == 2  # one a rank
    assert all(p.is_contiguous() for p in model)


def test_settings_of_groups_stay_and_state_of_others_parameters_goes() -> None:
    model = _model()
    groups = [{"params": list(model)[:3], "lr": 0.5}, {"params": list(model)[3:], "weight_decay": 0.7}]
    optimizer = SGD(groups, lr=0.1, momentum=0.9)
    for parameter in model:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert len(optimizer.state) == len(SIZES)
    ZeRO1(World(rank=1, size=2, device=torch.device("cpu"))).partition([optimizer])
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert set(map(id, optimizer.state)) == set(map(id, held))
    assert 0 < len(held) < len(SIZES)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.1]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0, 0.7]


@pytest.mark.parametrize("fused", [False, True])
def test_alone_it_steps_as_without(gloo_world: World, fused: bool) -> None:
    weights = []
    for name in ("ddp", "zero1"):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        optimizer = AdamW(model.parameters(), lr=0.1, fused=fused)
        engine = create_engine(model, optimizer, gloo_world, engine=name)
        for _ in range(3):
            with engine.micro_step(sync=True):
                engine.backward(engine.model(torch.ones(2, 3)).square().sum())
            assert engine.step().applied
        weights.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *weights))
