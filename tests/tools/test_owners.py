"""Rules that need whole tensors, on fsdp2: bit for bit the step of one process, whatever ranks there are and were.

The gradients are sums of small whole numbers over a power of two, exact in fp32 in any order: what differs is a step.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from distaccum.config.engine import FSDP2Config
from distaccum.config.precision import PrecisionConfig, ScalerConfig
from distaccum.distributed.world import World
from distaccum.engines.base import Engine, EngineState
from distaccum.engines.factory import create_engine
from distaccum.engines.modules import is_sharded, owners_by_size
from distaccum.engines.state import from_bytes, whole_state
from distaccum.errors import ConfigError, MisuseError
from distaccum.testing.counters import CollectiveCounter
from distaccum.tools.owners import cost
from distaccum.tools.plan import volume
from distaccum.tools.plan.sharding import sharding_of
from distaccum.train.ema import EMA
from tests.support.engine_matrix import EMA_DECAY, PRECISIONS
from tests.support.threads import on_ranks, run_ranks

SHAPES = ((5, 3), (3, 7), (1, 4), (8, 2))  # of weights: some ranks have no row of some
SAMPLES, WINDOWS = 8, 4
Make = Callable[[nn.Module], list[Optimizer]]
needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="from torch 2.9 on")


class Net(nn.Module):
    """Layers beside one another."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleList(nn.Linear(width, rows) for rows, width in SHAPES)
        self.used = len(SHAPES)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([layer(x[:, : layer.in_features]) for layer in self.layers[: self.used]], dim=1)


class Kronecker(Optimizer):
    """Keeps a list of two squares of each matrix, as Shampoo does, and reads a norm as a number."""

    def __init__(self, parameters: Any, **settings: Any) -> None:
        super().__init__(parameters, {"lr": 0.05, "whole": True} | settings)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step; of a group that is not ``whole`` element by element."""
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                change = self.changed(p) if group["whole"] else p.grad
                p.sub_(group["lr"] * change)

    def changed(self, p: Any) -> Any:
        g = p.grad.reshape(len(p), -1)
        left, right = self.state[p].setdefault("sides", [torch.eye(len(g)), torch.eye(g.shape[1])])
        left.add_(g @ g.T)
        right.add_(g.T @ g)
        return (left @ g @ right / (1.0 + left.norm().item() * right.norm().item())).view_as(p)


class Lars(Kronecker):
    """By norms, which of a shard are others."""

    def changed(self, p: Any) -> Any:
        return p.grad * (p.norm().item() / (1.0 + p.grad.norm().item()))


class Nested(Lars):
    """Steps twice by its parent's rule, and then by the norm of all that a tensor is."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for _ in range(2):
            super().step()
        for p in (p for group in self.param_groups for p in group["params"]):
            p.div_(max(1.0, p.norm().item()))


def muon(model: nn.Module) -> list[Optimizer]:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    return [torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1), torch.optim.AdamW(rest, lr=0.01, weight_decay=0.1)]


def kronecker(model: nn.Module) -> list[Optimizer]:
    return [Kronecker(model.parameters())]


def lars(model: nn.Module) -> list[Optimizer]:
    return [Lars(model.parameters())]


def nested(model: nn.Module) -> list[Optimizer]:
    lars(model)  # from here on torch runs hooks in the rule's super().step() too
    return [Nested(model.parameters())]


def mixed(model: nn.Module) -> list[Optimizer]:
    """One optimizer, of which one group alone needs whole tensors."""
    weights = [{"params": [p for p in model.parameters() if p.ndim == 2]}]
    return [Kronecker([*weights, {"params": [p for p in model.parameters() if p.ndim < 2], "whole": False}])]


def adafactor(model: nn.Module) -> list[Optimizer]:
    return [torch.optim.Adafactor(model.parameters(), lr=0.02)]


RULES = [kronecker, lars, mixed, adafactor, *([muon] if hasattr(torch.optim, "Muon") else [])]  # from torch 2.9 on


def some(cells: Iterable[Any], *light: Any) -> list[Any]:
    """All of them, of which those that are no ``light`` ones are heavy."""
    return [pytest.param(*cell, marks=() if cell in light else pytest.mark.heavy) for cell in cells]


def samples(window: int) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(window)
    x = torch.randint(-3, 4, (SAMPLES, 7), generator=draws).float()
    return x, torch.randint(-3, 4, (SAMPLES, sum(rows for rows, _ in SHAPES)), generator=draws).float()


def made() -> Net:
    model, draws = Net(), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(generator=draws)
    return model


def loss(model: nn.Module, window: int, rank: int = 0, ranks: int = 1) -> Tensor:
    """Its gradient is of whole numbers over 8, which no precision rounds."""
    x, factors = samples(window)
    found = model(x[rank::ranks])
    return (found * factors[rank::ranks, : found.shape[1]]).sum() / SAMPLES


def one_process(
    make: Make,
    windows: int = WINDOWS,
    *,
    used: Callable[[int], int] = lambda _: len(SHAPES),
    average: nn.Module | None = None,
) -> dict[str, Any]:
    """Weights, and what the optimizers keep, of a plain loop, which moves ``average``."""
    model = made()
    optimizers = make(model)
    for window in range(windows):
        model.used = used(window)
        model.zero_grad()
        loss(model, window).backward()
        for optimizer in optimizers:
            optimizer.step()
        for mean, weight in zip(average.parameters(), model.parameters(), strict=True) if average else ():
            mean.data.lerp_(weight.data, 1 - EMA_DECAY)
    kept = {p: entries for optimizer in optimizers for p, entries in optimizer.state.items()}
    names = {name: kept.get(p, {}) for name, p in model.named_parameters()}
    entries = {f"state.{name}.{key}": value for name, each in names.items() for key, value in each.items()}
    return dict(model.state_dict()) | entries


def engine_of(
    name: str,
    make: Make,
    world: World,
    *,
    first: Callable[[Optimizer], None] = lambda _: None,
    precision: str = "fp32",
    **settings: Any,
) -> Engine:
    model = made()
    optimizers = make(model)
    first(optimizers[0])
    kind: Any = FSDP2Config(**settings) if settings else name
    policy = PrecisionConfig(name=precision, scaler=ScalerConfig(initial_scale_power=16))
    return create_engine(model, optimizers, world, engine=kind, precision=policy)


def train(engine: Engine, windows: Iterable[int], *, scaled: float = 1.0) -> bool:
    """Whether the last window was applied."""
    applied = False
    for window in windows:
        engine.begin_window(1)
        with engine.micro_step(sync=True):
            with engine.autocast():
                total = loss(engine.model, window, engine.world.rank, engine.world.size)
            engine.backward(total * scaled)
        applied = engine.step().decision.read()[0] == 1.0
    return applied


def expect_same(found: EngineState, expected: Mapping[str, Any]) -> None:
    tensors = {**found.model, **found.optimizer}
    assert found.model.keys() <= expected.keys()
    for name, value in expected.items():
        if isinstance(value, list):
            assert all(map(torch.equal, from_bytes(tensors[name]), value)), name
        else:
            assert torch.equal(tensors[name], value), name


@pytest.mark.parametrize(("make", "ranks"), some(product(RULES, [1, 2, 3, 4]), (lars, 2), (mixed, 3), (muon, 1)))
def test_the_step_is_one_process_own_bit_for_bit(make: Make, ranks: int) -> None:
    def run(world: World) -> EngineState:
        engine = engine_of("fsdp2", make, world)
        train(engine, range(WINDOWS))
        return whole_state(engine, world)

    expected = one_process(make)
    for found in on_ranks(ranks, run):
        expect_same(found, expected)


@pytest.mark.filterwarnings("ignore:precision=fp16")
@pytest.mark.parametrize(
    ("make", "precision", "ranks"),
    some(product(RULES, PRECISIONS, [1, 2, 4]), (mixed, "fp32", 2), (muon, "fp16", 2), (kronecker, "bf16-weights", 2)),
)
def test_so_are_it_and_the_moving_average_in_every_precision(make: Make, precision: str, ranks: int) -> None:
    """In fp16 the first windows overflow, on some ranks, and come again."""

    def run(world: World) -> tuple[EngineState, dict[str, Tensor], int]:
        engine = engine_of("fsdp2", make, world, precision=precision)
        average, skipped, a_run = EMA(decay=EMA_DECAY), 0, Any
        average.begin(engine)
        for window in range(WINDOWS):
            while not train(engine, [window]):
                skipped += 1
            average.on_update(a_run, a_run)  # type: ignore[arg-type]
        return whole_state(engine, world), average.whole(lambda _: True), skipped

    average = made()
    expected = one_process(make, average=average)
    for found, averages, skipped in on_ranks(ranks, run):
        expect_same(found, expected)
        assert all(torch.equal(averages[name], value) for name, value in average.state_dict().items())
        assert (skipped > 0) == (precision == "fp16")


@needs_muon
def test_the_rule_is_known_on_more_ranks_than_a_trial_has_rows() -> None:
    """DTensor can step a trial's six rows on no eight ranks, and a tall matrix it can, with other bits."""
    x, weight = torch.randn(64, 16, generator=torch.Generator().manual_seed(0)).split([16, 48])

    def window(layer: nn.Module, ranks: int) -> Tensor:
        return layer(x).pow(3).sum() / ranks  # type: ignore[no-any-return]

    def run(world: World) -> Tensor:
        layer = nn.Linear(16, 48, bias=False)
        layer.load_state_dict({"weight": weight})
        engine = create_engine(layer, torch.optim.Muon(layer.parameters(), lr=0.1), world, engine="fsdp2")
        engine.begin_window(1)
        with engine.micro_step(sync=True):
            engine.backward(window(engine.model, world.size))
        engine.step()
        return whole_state(engine, world).model["weight"]

    expected = nn.Linear(16, 48, bias=False)
    expected.load_state_dict({"weight": weight})
    window(expected, 1).backward()
    torch.optim.Muon(expected.parameters(), lr=0.1).step()
    for found in on_ranks(8, run):
        assert torch.equal(found, expected.weight)


@pytest.mark.heavy
def test_replicas_of_the_shards_step_alike() -> None:
    def run(world: World) -> tuple[EngineState, int, dict[str, Tensor]]:
        engine = engine_of("fsdp2", kronecker, world, replicas=2)
        train(engine, range(WINDOWS))
        return whole_state(engine, world), *engine.probe.replicated_state()

    results = on_ranks(4, run)
    for found, _, _ in results:
        expect_same(found, one_process(kronecker))
    assert [group for _, group, _ in results] == [0, 1, 0, 1]
    for (_, _, kept), (_, _, others) in zip(results[:2], results[2:], strict=True):
        assert kept.keys() == others.keys()
        assert all(torch.equal(kept[name], others[name]) for name in kept)


PATHS = ("fsdp2 2, ddp 1, fsdp2 3", "zero1 2, fsdp2 1, fsdp2 4", "ddp 2, fsdp2 2, zero1 3")


@pytest.mark.parametrize(("make", "path"), some(product(RULES, PATHS), (kronecker, PATHS[0])))
def test_a_state_goes_on_bit_for_bit_on_another_engine_and_other_ranks(make: Make, path: str) -> None:
    states: list[EngineState] = []

    def run(name: str, world: World) -> EngineState:
        engine = engine_of(name, make, world)
        if states:
            engine.load_state(states[-1])
        train(engine, range(2 * len(states), 2 * len(states) + 2))
        return whole_state(engine, world)

    for name, ranks in (place.split() for place in path.split(", ")):
        states.append(on_ranks(int(ranks), partial(run, name))[0])
    expect_same(states[-1], one_process(make, 2 * len(states)))
    assert states[-1].optimizer.keys() == states[0].optimizer.keys()


@pytest.mark.parametrize("first", [True, False])
def test_a_window_that_is_not_finite_moves_nothing(first: bool) -> None:
    def run(world: World) -> EngineState:
        engine = engine_of("fsdp2", kronecker, world)
        train(engine, range(0 if first else 2))
        train(engine, range(7, 8), scaled=torch.inf)
        train(engine, range(0 if first else 2, WINDOWS))
        return whole_state(engine, world)

    for found in on_ranks(2, run):
        expect_same(found, one_process(kronecker))


def test_a_tensor_without_a_gradient_stays_as_it_is() -> None:
    def run(world: World) -> EngineState:
        engine = engine_of("fsdp2", mixed, world)
        engine.unwrapped_model.used = 2  # type: ignore[assignment]
        train(engine, range(2))
        engine.unwrapped_model.used = len(SHAPES)  # type: ignore[assignment]
        train(engine, range(2, 4))
        return whole_state(engine, world)

    for found in on_ranks(2, run):
        expect_same(found, one_process(mixed, used=lambda window: 2 if window < 2 else len(SHAPES)))


@needs_muon
def test_one_rank_alone_has_the_state_of_a_matrix_and_nothing_else_of_it_between_two_steps() -> None:
    def run(world: World) -> tuple[dict[str, int], str]:
        engine = engine_of("fsdp2", muon, world)
        train(engine, range(1))
        kept = engine.optimizers[0].state
        assert all(not p.numel() and p.grad is None for p in kept)
        groups = [group for optimizer in engine.optimizers for group in optimizer.param_groups]
        assert all(is_sharded(p) for group in groups for p in group["params"])
        assert all(is_sharded(entries["exp_avg"]) for entries in engine.optimizers[1].state.values())
        group, tensors = engine.probe.replicated_state()
        assert group == 0
        assert sorted(tensors) == [f"step of layers.{n}.bias" for n in range(len(SHAPES))]
        return {str(tuple(each["momentum_buffer"].shape)): world.rank for each in kept.values()}, engine.describe()

    found, said = zip(*on_ranks(2, run), strict=True)
    assert sorted(shape for each in found for shape in each) == sorted(map(str, SHAPES))
    assert all(found)
    size = 4 * sum(rows * width for rows, width in SHAPES)
    assert f"; {size} B of parameters stepped by Muon whole" in said[0]


def test_what_travels_is_what_was_forecast(gloo_world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CollectiveCounter, "SMALL", 0)
    engine = engine_of("fsdp2", kronecker, gloo_world)
    train(engine, range(1))
    with CollectiveCounter() as counter:
        train(engine, range(1, 2))
    elements = sum(p.numel() for p in made().parameters())
    expected = volume.payloads(sharding_of(FSDP2Config()), elements, 0, 1, owned=elements)
    assert counter.calls["all-to-all"] == 3
    assert counter.payload["all-to-all"] == expected["all-to-all"]


def test_hooks_on_the_step_see_shards_and_states_are_the_accumulators() -> None:
    seen: list[bool] = []

    def look(optimizer: Optimizer, *_: Any) -> None:
        seen.extend(is_sharded(p) for group in optimizer.param_groups for p in group["params"])

    def hooked(optimizer: Optimizer) -> None:
        optimizer.register_step_pre_hook(look)
        optimizer.register_step_post_hook(look)

    def run(world: World) -> None:
        engine = engine_of("fsdp2", kronecker, world, first=hooked)
        (optimizer,) = engine.optimizers
        optimizer.register_step_pre_hook(look)
        optimizer.register_step_post_hook(look)
        train(engine, range(2))
        with pytest.raises(MisuseError, match="see one rank's share"):
            optimizer.state_dict()

    on_ranks(2, run)
    assert len(seen) == 2 * 2 * 4 * 2 * len(SHAPES)
    assert all(seen)


def test_the_steps_within_a_step_are_one_process_own_unless_hooks_would_see_whole_tensors() -> None:
    def run(world: World, *hooks: Any) -> EngineState:
        engine = engine_of("fsdp2", nested, world)
        for hook in hooks:
            engine.optimizers[0].register_step_post_hook(hook)
        train(engine, range(WINDOWS))
        return whole_state(engine, world)

    for found in on_ranks(2, run):
        expect_same(found, one_process(nested))
    for raised in run_ranks(2, lambda world: run(world, lambda *_: None)):
        assert isinstance(raised, MisuseError)
        assert "would see a part of the parameters" in str(raised)


def test_after_an_error_in_a_step_the_groups_hold_shards() -> None:
    def run(world: World) -> EngineState:
        engine = engine_of("fsdp2", kronecker, world)
        (optimizer,) = engine.optimizers
        changed, broken = Kronecker.changed, [True]

        def fail(p: Any) -> Any:
            if broken:
                raise ArithmeticError("of the rule")
            return changed(optimizer, p)  # type: ignore[arg-type]

        optimizer.changed = fail  # type: ignore[attr-defined]
        with pytest.raises(ArithmeticError, match="of the rule"):
            train(engine, range(1))
        assert all(is_sharded(p) for group in optimizer.param_groups for p in group["params"])
        engine.zero_gradients()
        with pytest.raises(MisuseError, match="called by hand"):
            optimizer.step()
        broken.clear()
        train(engine, range(WINDOWS))
        return whole_state(engine, world)

    for found in on_ranks(2, run):
        expect_same(found, one_process(kronecker))


class ByTheNormOfAll(Kronecker):
    """Couples all parameters."""

    def changed(self, p: Any) -> Any:
        every = (q.grad for group in self.param_groups for q in group["params"] if q.grad is not None)
        return p.grad / (1.0 + sum(float(gradient.square().sum()) for gradient in every))


class Draws(Kronecker):
    """Random."""

    def changed(self, p: Any) -> Any:
        return super().changed(p) * torch.rand(()).item()


@pytest.mark.parametrize(
    ("kind", "settings", "problem"),
    [
        (ByTheNormOfAll, {}, "optimizer=ByTheNormOfAll: its step of one parameter depends on the others"),
        (Kronecker, {"offload": True}, r"engine\.offload=True: Kronecker's rule needs whole tensors"),
        (Draws, {"replicas": 2}, r"engine\.replicas=2: its rule draws random numbers"),
    ],
)
def test_what_owners_cannot_step_is_refused_on_every_rank(kind: Any, settings: dict[str, Any], problem: str) -> None:
    for raised in run_ranks(2, lambda world: engine_of("fsdp2", lambda m: [kind(m.parameters())], world, **settings)):
        assert isinstance(raised, ConfigError)
        assert re.search(problem, str(raised))


def test_the_cost_is_shared_out() -> None:
    width = 64
    block = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    costs = [cost(shape) for shape in block * 12]
    assert costs[:2] == [3 * width**3, width**3]
    assert costs[2] == costs[3]
    owners = owners_by_size(costs, 8)
    loads = [sum(each for each, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(8)]
    assert max(loads) <= 1.1 * sum(loads) / 8
