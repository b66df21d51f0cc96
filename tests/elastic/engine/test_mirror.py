"""A step of zero1 in which a rank is lost is made by all that are left, or by none, to the same bits."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from distaccum import Accumulator
from distaccum.accumulation.progress import Progress
from distaccum.accumulation.settings import AccumulatorSettings
from distaccum.config.engine import Zero1Config
from distaccum.config.precision import PrecisionConfig
from distaccum.data.loader import MapWindowLoader
from distaccum.data.plan.batch import BatchPlan
from distaccum.data.plan.units import UnitPlan
from distaccum.distributed.world import World
from distaccum.elastic.engine.builder import ElasticEngines
from distaccum.elastic.engine.ddp import own_state, resumable
from distaccum.elastic.engine.shares import LostStateError, Share, Shares
from distaccum.elastic.engine.window import run_window
from distaccum.engines.base import EngineState
from distaccum.engines.context import EngineContext
from distaccum.engines.factory import create, prepare
from distaccum.engines.numerics import Numerics
from tests.elastic.engine.test_elastic import LOSS, SAMPLES, LostError, drawn
from tests.support.threads import run_ranks

pytestmark = pytest.mark.usefixtures("deterministic")


@dataclass
class Left:
    """What a rank has when it leaves."""

    progress: Progress
    state: EngineState
    shares: Shares


def accumulator(world: World, precision: str, keepers: Sequence[int] = ()) -> Accumulator:
    layers = nn.Linear(5, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3)
    model = nn.Sequential(*layers)
    if precision != "fp16":  # ranks are threads, and share autocast's cache, by which the two uses are one cast or two
        model[4].weight = model[2].weight
    drawn(model)
    settings = PrecisionConfig.of(precision)
    settings = replace(settings, scaler=replace(settings.scaler, initial_scale_power=8, growth_interval=2))
    context = EngineContext(
        engine=Zero1Config(),
        precision=settings,
        clip_norm=1.0,
        global_batch_size=12,
        micro_batch_size=2,
        world_size=world.size,
        device=world.device,
        numerics=Numerics.of("reproducible"),
        builder=ElasticEngines(),
    )
    prepared = prepare(model, context)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2)]
    settings = AccumulatorSettings(
        global_batch_size=12,
        micro_batch_size=2,
        count=LOSS.count,
        verify="never",
        seed=3,
        schedule=lambda step: 1 / (1 + step),
    )
    engine = create(replace(prepared, builder=ElasticEngines(keepers)), model, optimizers, world)
    acc = Accumulator.of_engine(engine, optimizers, settings)
    acc.run_windows_by(run_window)
    return acc


def windows(acc: Accumulator, world: World) -> Iterator[Any]:
    plan = BatchPlan(samples=60, global_batch_size=12, micro_batch_size=2, world_size=world.size, seed=5)
    return iter(acc.windows(MapWindowLoader(SAMPLES, UnitPlan(plan=plan, virtual_ranks=8), world, seed=3)))


def end_of(acc: Accumulator, world: World) -> tuple[Tensor, Any]:
    """Weights and loss scale after the rest of the epoch."""
    for window in windows(acc, world):
        acc.step(window, LOSS)
    weights = torch.cat([p.detach().flatten().double() for p in acc.engine.unwrapped_model.parameters()])
    return weights, acc.engine.loss_scale.clone() if acc.engine.loss_scale is not None else None


def undisturbed(world: World, precision: str) -> tuple[Tensor, Any]:
    return end_of(accumulator(world, precision), world)


def left_at(world: World, place: str, precision: str, window: int, keepers: Sequence[int] = ()) -> Left:
    """Ends in the step of a window; of ``broadcast`` some weights have come, and ``commit`` is reached by rank 0."""
    acc = accumulator(world, precision, keepers)
    steps = windows(acc, world)
    for _ in range(window):
        acc.step(next(steps), LOSS)
    engine = cast(Any, acc.engine)
    mirror, shards, zero = engine._stepper.mirror, engine._stepper, engine.zero_gradients

    def lose(*_: object) -> None:
        raise LostError

    if place in ("exchange", "commit"):
        setattr(mirror, place, lose)
    elif place == "broadcast":
        shards._flat_buffers = shards._flat_buffers[: len(shards._flat_buffers) // 2]
        mirror.commit = lose
    if place == "commit" and world.rank == 0:
        del mirror.commit
        engine.zero_gradients = lambda: (zero(), lose())
    with pytest.raises(LostError):
        acc.step(next(steps), LOSS)
    if place == "commit" and world.rank:
        for parameter in engine._parameters:  # as if not all had come
            if shards.owner(parameter) != world.rank:
                parameter.detach().normal_()
    progress, shares = acc.tracker.progress, engine.shares
    if place == "commit" and world.rank == 0:
        progress = progress.after(samples=12, tokens=12, applied=True)
    return Left(progress, own_state(engine, shares), shares)


def gone_on(world: World, left: list[Left | None], precision: str) -> tuple[Tensor, Any]:
    """The rest of the epoch by others, chosen as ``hand_over`` does; None is a newcomer."""
    there = [one for one in left if one is not None]
    source = max(there, key=lambda one: one.progress.window)
    torn = any(one.shares.torn for one in there if one.progress.window == source.progress.window)
    own = left[world.rank]
    behind = own is None or own.progress.window < source.progress.window
    state = source.state if behind else cast(Left, own).state
    share = Share() if own is None else (own.shares.ahead if behind else own.shares.now)
    assert share is not None
    acc = accumulator(world, precision)
    resumable(acc.engine).load_dealt(replace(state), share, torn=torn)
    acc.restore(source.progress, {}, None, {}, {})
    return end_of(acc, world)


@pytest.mark.filterwarnings("ignore::distaccum.errors.PrecisionWarning")
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16-weights"])
@pytest.mark.parametrize("window", [0, 2])
@pytest.mark.parametrize("place", ["exchange", "broadcast", "commit"])
@pytest.mark.parametrize(
    "ranks",
    [(3, 1, 1), *(pytest.param(one, marks=pytest.mark.heavy) for one in ((2, 0, 0), (2, 1, 1), (4, 2, 2)))],
    ids=str,
)
def test_those_who_are_left_go_on_to_the_same_bits(
    ranks: tuple[int, int, int], place: str, window: int, precision: str
) -> None:
    there, gone, new = ranks
    [(expected, scale)] = run_ranks(1, lambda world: undisturbed(world, precision))  # type: ignore[misc]
    before: list[Any] = run_ranks(there, lambda world: left_at(world, place, precision, window))
    assert all(isinstance(one, Left) for one in before), before
    left = [*(one for rank, one in enumerate(before) if rank != gone), *[None] * new]
    if place == "commit" and gone == 0:
        assert not any(one.progress.window > window for one in left if one is not None)
    found: list[Any] = run_ranks(len(left), lambda world: gone_on(world, left, precision))
    for weights, own_scale in found:
        assert torch.equal(weights, expected)
        assert own_scale == scale


@pytest.mark.parametrize("place", ["broadcast", "commit"])
def test_copies_on_another_node_outlive_a_node(place: str) -> None:
    [(expected, _)] = run_ranks(1, lambda world: undisturbed(world, "fp32"))  # type: ignore[misc]
    before: list[Any] = run_ranks(4, lambda world: left_at(world, place, "fp32", 2, keepers=(2, 3, 0, 1)))
    for node in (before[:2], before[2:]):
        found: list[Any] = run_ranks(2, lambda world, node=node: gone_on(world, node, "fp32"))
        assert all(torch.equal(weights, expected) for weights, _ in found)


def test_neighbours_that_are_lost_together_take_a_state_with_them() -> None:
    before: list[Any] = run_ranks(3, lambda world: left_at(world, "exchange", "fp32", 1))
    for error in run_ranks(1, lambda world: gone_on(world, before[:1], "fp32")):
        assert isinstance(error, LostStateError)
