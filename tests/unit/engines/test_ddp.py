"""The DDP engine through a real gloo group of one, and how zero1 deals the optimizer state out."""

from copy import deepcopy
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from distaccum.config.engine import DDPConfig
from distaccum.distributed.world import World
from distaccum.engines.base import Engine
from distaccum.engines.ddp.zero1 import ZeRO1
from distaccum.engines.factory import create_engine
from distaccum.errors import MisuseError
from distaccum.testing.counters import OperationCounter


class Branches(nn.Module):
    """Uses ``second`` only where the input is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.second(y) if bool(x[0, 0] > 0) else y


def _engine(model: nn.Module, world: World, **options: bool) -> Engine:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5, fused=True)
    return create_engine(model, optimizer, world, engine=DDPConfig(**options))


def _window(engine: Engine, inputs: list[Tensor]) -> None:
    for i, x in enumerate(inputs):
        with engine.micro_step(sync=i == len(inputs) - 1):
            engine.backward(engine.model(x).square().sum())


def _addresses(model: nn.Module) -> list[int]:
    return [p.grad.data_ptr() for p in model.parameters() if p.grad is not None]


def test_gradients_lie_in_the_buckets_from_the_start_and_stay_there(gloo_world: World) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    engine = _engine(model, gloo_world)
    buffers = {p.grad.untyped_storage().data_ptr() for p in model.parameters() if p.grad is not None}
    assert len(buffers) == 1  # one bucket, and every gradient is a view of it
    addresses = _addresses(model)
    assert len(addresses) == 4
    for _ in range(3):
        _window(engine, [torch.randn(2, 3) for _ in range(3)])
        assert _addresses(model) == addresses
        engine.step()
        assert _addresses(model) == addresses
        assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)


class TwoOutputs(nn.Module):
    """Of which a loss may leave one out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x), self.second(x)


def test_what_only_a_left_out_output_reaches_does_not_move(gloo_world: World) -> None:
    """Its backward is called, without a gradient."""
    model = TwoOutputs()
    before = deepcopy(model.second.state_dict())
    engine = _engine(model, gloo_world, find_unused_parameters=True)
    with engine.micro_step(sync=True):
        engine.backward(engine.model(torch.randn(2, 3))[0].square().sum())
    assert engine.step().applied
    assert all(torch.equal(model.second.state_dict()[name], before[name]) for name in before)


def test_the_learning_rate_is_a_factor_of_each_groups_own(gloo_world: World) -> None:
    model = nn.Linear(3, 3)
    groups = [{"params": [model.weight], "lr": 0.5}, {"params": [model.bias]}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    engine = create_engine(model, optimizer, gloo_world)
    engine.set_lr_factor(0.5)
    engine.set_lr_factor(0.2)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.020000000000000004]


def test_a_parameter_that_was_never_used_can_be_saved_and_loaded(gloo_world: World) -> None:
    inputs = [[-torch.ones(1, 3)] * 2, [torch.ones(1, 3)] * 2]
    engines = []
    for _ in range(2):
        torch.manual_seed(1)
        engines.append(_engine(Branches(), gloo_world, find_unused_parameters=True))
    _window(engines[0], inputs[0])
    engines[0].step()
    engines[1].load_state(deepcopy(engines[0].state()))
    for engine in engines:
        _window(engine, inputs[1])
        engine.step()
    first, second = (list(engine.unwrapped_model.parameters()) for engine in engines)
    assert all(torch.equal(p, q) for p, q in zip(first, second, strict=True))


def test_a_loaded_optimizer_keeps_this_runs_settings(gloo_world: World) -> None:
    saved = _engine(nn.Linear(3, 3), gloo_world)
    _window(saved, [torch.ones(1, 3)])
    saved.step()
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, weight_decay=0.01, fused=True)
    engine = create_engine(model, optimizer, gloo_world)
    engine.load_state(deepcopy(saved.state()))
    engine.set_lr_factor(0.5)
    (group,) = optimizer.param_groups
    assert (group["lr"], group["weight_decay"], group["betas"]) == (0.0005, 0.01, (0.9, 0.999))
    assert optimizer.state[model.weight]["step"].item() == 1


def test_state_lies_where_this_runs_kernel_wants_it(gloo_world: World) -> None:
    """torch reads in the groups that it is given whether a kernel is fused, which keeps ``step`` on the device."""
    saved = create_engine(model := nn.Linear(3, 3), torch.optim.AdamW(model.parameters(), fused=False), gloo_world)
    _window(saved, [torch.ones(1, 3)])
    saved.step()
    fresh = create_engine(model := nn.Linear(3, 3), torch.optim.AdamW(model.parameters(), fused=True), gloo_world)
    given: list[object] = []
    load = torch.optim.AdamW.load_state_dict

    def note(optimizer: torch.optim.AdamW, state_dict: dict[str, Any]) -> None:
        given.extend(group["fused"] for group in state_dict["param_groups"])
        load(optimizer, state_dict)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "load_state_dict", note)
        fresh.load_state(saved.state())
    assert set(given) == {True}


def test_a_compiled_model_with_a_patched_forward_and_a_hook_is_wrapped_as_it_is(gloo_world: World) -> None:
    model = nn.Linear(3, 3)
    plain_forward = model.forward
    model.forward = lambda x: 2 * plain_forward(x)  # type: ignore[method-assign]
    seen: list[int] = []
    model.register_forward_pre_hook(lambda _, arguments: seen.append(len(arguments)))
    engine = _engine(torch.compile(model, backend="eager"), gloo_world)  # type: ignore[arg-type]
    assert seen == []
    x = torch.ones(1, 3)
    torch.testing.assert_close(engine.model(x), 2 * plain_forward(x))
    _window(engine, [x, x])
    assert engine.step().applied


@pytest.mark.parametrize("find_unused", [False, True])
def test_a_stand_in_reduces_and_adds_nothing(gloo_world: World, find_unused: bool) -> None:
    torch.manual_seed(1)
    model = Branches()
    engine = _engine(model, gloo_world, find_unused_parameters=find_unused)
    seen: list[int] = []
    model.register_forward_pre_hook(lambda _, arguments: seen.append(len(arguments)))
    addresses, before = _addresses(model), [p.detach().clone() for p in model.parameters()]
    with OperationCounter() as operations:
        engine.shadow_micro_step()
    assert operations.counts["gradient reductions"] == 1
    assert seen == []  # the user's forward did not run
    assert _addresses(model) == addresses
    assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)
    assert engine.step().grad_norm.item() == 0
    moved = [not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)]
    assert moved == [not find_unused] * 4  # decay moves what a window used, and a stand-in uses nothing


def test_a_forward_past_the_engine_is_refused(gloo_world: World) -> None:
    """Also in a window's later micro-step: each one's forward is asked for."""
    model = nn.Linear(3, 3)
    engine = _engine(model, gloo_world)
    for forward in (engine.model, model):
        with engine.micro_step(sync=forward is model):
            loss = forward(torch.ones(1, 3)).sum()
            if forward is model:
                with pytest.raises(MisuseError, match=r"call acc\.model \(engine\.model\)"):
                    engine.backward(loss)
            else:
                engine.backward(loss)


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
