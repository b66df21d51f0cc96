"""A window that goes on with fewer ranks: the same bits, and each unit once."""

import sys
from types import FrameType
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from distaccum import Accumulator
from distaccum.accumulation.settings import AccumulatorSettings
from distaccum.config.engine import DDPConfig, DeepSpeedConfig, EngineConfig, FSDP2Config
from distaccum.config.precision import PrecisionConfig
from distaccum.data.loader import MapWindowLoader
from distaccum.data.plan.batch import BatchPlan
from distaccum.data.plan.units import UnitPlan, joined
from distaccum.distributed.world import World
from distaccum.elastic.engine.builder import ElasticEngines
from distaccum.elastic.engine.ddp import resumable
from distaccum.elastic.engine.tree import PartialWindow
from distaccum.elastic.engine.window import Again, ContinuedPlan, SecondAssignment, SharedOutcome, run_window
from distaccum.engines.context import EngineContext
from distaccum.engines.factory import create, prepare
from distaccum.engines.numerics import Numerics
from distaccum.errors import ConfigError, MisuseError
from distaccum.losses.cross_entropy import CrossEntropy
from distaccum.losses.normalize import SINGLE
from tests.support.threads import run_ranks

SAMPLES = [(torch.randn(5, generator=torch.Generator().manual_seed(i)), i % 3) for i in range(60)]
LOSS = CrossEntropy()


class LostError(Exception):
    """A rank is gone."""


def drawn(model: nn.Module) -> None:
    """Gives it its weights: ranks are threads here, and share torch's own generator."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.05, generator=generator)


class Unused(nn.Linear):
    """Has a layer that no forward uses."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.other = nn.Linear(3, 3)


def accumulator(
    world: World, *, numerics: str, elastic: bool, precision: str = "fp32", unused: bool = False, finds: bool = True
) -> Accumulator:
    last = (Unused if unused else nn.Linear)(700, 3)
    model = nn.Sequential(nn.Linear(5, 400), nn.Tanh(), nn.Linear(400, 700), nn.Tanh(), last)
    drawn(model)
    context = EngineContext(
        # Several buckets, of which torch makes the first of 1 MiB.
        engine=DDPConfig(bucket_cap_mb=0.001, find_unused_parameters=unused and finds),
        precision=PrecisionConfig(name=precision),
        clip_norm=1.0,
        global_batch_size=20,
        micro_batch_size=2,
        world_size=world.size,
        device=world.device,
        numerics=Numerics.of(numerics),
        builder=ElasticEngines() if elastic else None,
    )
    prepared = prepare(model, context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    settings = AccumulatorSettings(
        global_batch_size=20, micro_batch_size=2, count=LOSS.count, clip_norm=1.0, verify="never", seed=3
    )
    acc = Accumulator.of_engine(create(prepared, model, [optimizer], world), [optimizer], settings)
    if elastic:
        acc.run_windows_by(run_window)
    return acc


def plan_of(world: World, numerics: str) -> Any:
    plan = BatchPlan(samples=60, global_batch_size=20, micro_batch_size=2, world_size=world.size, seed=5)
    return UnitPlan(plan=plan, virtual_ranks=8) if numerics == "reproducible" else plan


def weights(acc: Accumulator) -> Tensor:
    return torch.cat([p.detach().flatten() for p in acc.engine.unwrapped_model.parameters()])


def run(world: World, *, numerics: str, elastic: bool, **more: Any) -> tuple[Tensor, list[Tensor]]:
    acc = accumulator(world, numerics=numerics, elastic=elastic, **more)
    losses = []
    for window in acc.windows(MapWindowLoader(SAMPLES, plan_of(world, numerics), world, seed=3)):
        outcome = acc.step(window, LOSS)
        if elastic:
            assert isinstance(outcome, SharedOutcome)
            losses.append(outcome.of_all.sum())
    found = weights(acc)
    acc.close()
    return found, losses


@pytest.mark.usefixtures("deterministic")
@pytest.mark.filterwarnings("ignore::distaccum.errors.PrecisionWarning")
@pytest.mark.parametrize(
    "more", [{"precision": "fp32"}, {"precision": "bf16"}, {"precision": "fp16"}, {"unused": True}], ids=str
)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_bits_are_those_of_a_run_that_is_not_elastic(ranks: int, more: dict[str, Any]) -> None:
    def both(world: World) -> Any:
        return [run(world, numerics="reproducible", elastic=elastic, **more) for elastic in (False, True)]

    for (plain, _), (found, losses) in run_ranks(ranks, both):  # type: ignore[misc]
        assert torch.equal(plain, found)
        assert all(map(torch.isfinite, losses))


@pytest.mark.usefixtures("deterministic")
def test_a_loss_that_leaves_a_parameter_out_is_refused_on_all_ranks() -> None:
    def refused(world: World) -> None:
        with pytest.raises(MisuseError, match=r"does not depend on 4\.other"):
            run(world, numerics="reproducible", elastic=True, unused=True, finds=False)

    run_ranks(2, refused)


def _calls(world: World, *, elastic: bool) -> int:
    """The frames that Python enters in a window, without those of waiting for other threads: the least of several."""
    acc = accumulator(world, numerics="reproducible", elastic=elastic)
    found, calls = [], 0

    def note(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        calls += event == "call" and not frame.f_code.co_filename.endswith(("threading.py", "multi_threaded_pg.py"))

    loader = MapWindowLoader(SAMPLES, plan_of(world, "reproducible"), world, seed=3)
    for _ in range(10):
        for window in acc.windows(loader):
            calls = 0
            sys.setprofile(note)
            acc.step(window, LOSS)
            sys.setprofile(None)
            found.append(calls)
    acc.close()
    return min(found)


@pytest.mark.usefixtures("deterministic")
def test_a_window_makes_hardly_a_call_more() -> None:
    def both(world: World) -> list[int]:
        return [_calls(world, elastic=elastic) for elastic in (False, True)]

    for plain, elastic in run_ranks(2, both):
        assert elastic < 1.02 * plain, (plain, elastic)  # of a short window


def test_in_fast_numerics_the_sum_is_the_windows() -> None:
    [(alone, losses)] = run_ranks(1, lambda world: run(world, numerics="fast", elastic=True))  # type: ignore[misc]
    for found, others in run_ranks(3, lambda world: run(world, numerics="fast", elastic=True)):  # type: ignore[misc]
        assert (found - alone).norm() < 1e-4 * alone.norm()  # Adam makes much of what is nearly zero
        torch.testing.assert_close(others, losses, rtol=1e-6, atol=0)


def interrupted(world: World, *, place: str, after: int) -> tuple[dict[str, Any], PartialWindow]:
    """Ends at a place in the reduction of the second window: the state before, and what is kept."""
    acc = accumulator(world, numerics="reproducible", elastic=True)
    windows = acc.windows(MapWindowLoader(SAMPLES, plan_of(world, "reproducible"), world, seed=3))
    acc.step(next(windows), LOSS)
    state = acc.state_dict()
    window, tree = next(windows), cast(Any, acc.engine)._reducer

    assert len(tree._buckets) > 1
    calls, real = 0, getattr(tree, place)

    def lose(*arguments: object) -> None:
        nonlocal calls
        calls += 1
        if calls > after:
            raise LostError
        real(*arguments)

    setattr(tree, place, lose)
    with pytest.raises(LostError):
        acc.step(window, LOSS)
    kept = resumable(acc.engine).kept
    kept = PartialWindow(
        sums={node: [one.clone() for one in sums] for node, sums in kept.sums.items()}, along=kept.along
    )
    return state, kept


def finished(world: World, state: dict[str, Any], held: list[PartialWindow]) -> tuple[Tensor, list[float], list[int]]:
    """The rest of the run, on the ranks that are left."""
    nodes = [sorted(one.sums) for one in held]
    covered = {block for each in nodes for node in each for block in range(*node)}
    lost = [block for block in range(8) if block not in covered]
    share = [tuple(lost[len(lost) * r // world.size : len(lost) * (r + 1) // world.size]) for r in range(world.size)]
    again = SecondAssignment(10, 8, world.size, tuple(map(tuple, nodes)), tuple(share))
    assert sorted(node for r in range(world.size) for node in joined(8, nodes[r], share[r])[0])
    acc = accumulator(world, numerics="reproducible", elastic=True)
    acc.load_state_dict(state)
    begun = Again(epoch=0, window=1, assignment=again, counts={SINGLE: 20})
    plan = ContinuedPlan.of(plan_of(world, "reproducible"), begun)
    resumable(acc.engine).take_up(held[world.rank])
    losses, computed = [], []
    for window in acc.windows(MapWindowLoader(SAMPLES, plan, world, seed=3)):
        outcome = acc.step(window, LOSS)
        assert isinstance(outcome, SharedOutcome)
        losses.append(float(outcome.of_all.sum()))
        computed.append(len(window))
    return weights(acc), losses, computed


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(("place", "after"), [("_send", 0), ("_finish", 0), ("_finish", 1)])
@pytest.mark.parametrize(("ranks", "gone"), [(2, [0]), (3, [0, 2]), (4, [3])])
def test_the_ranks_that_are_left_finish_the_window_to_the_same_bits(
    ranks: int, gone: list[int], place: str, after: int
) -> None:
    [(expected, _)] = run_ranks(1, lambda world: run(world, numerics="reproducible", elastic=False))  # type: ignore[misc]
    [(_, losses)] = run_ranks(1, lambda world: run(world, numerics="reproducible", elastic=True))  # type: ignore[misc]
    before: list[Any] = run_ranks(ranks, lambda world: interrupted(world, place=place, after=after))
    left = [one for rank, one in enumerate(before) if rank not in gone]
    state, held = left[0][0], [kept for _, kept in left]
    found: list[Any] = run_ranks(len(left), lambda world: finished(world, state, held))
    for own, own_losses, _ in found:
        assert torch.equal(own, expected)
        assert own_losses == [float(one) for one in losses[1:]]
    assert sum(computed[0] for _, _, computed in found) < 10 - len(left)  # units that are held are not computed again


@pytest.mark.parametrize("engine", [FSDP2Config(), DeepSpeedConfig()], ids=["fsdp2", "deepspeed"])
def test_engines_that_share_the_state_may_go_back(engine: EngineConfig) -> None:
    if isinstance(engine, DeepSpeedConfig):
        pytest.importorskip("deepspeed")
    assert _prepared(engine).builder is not None


def test_replicas_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine.replicas=2: in an elastic run the number of ranks changes"):
        _prepared(FSDP2Config(replicas=2))


def _prepared(engine: EngineConfig) -> EngineContext:
    context = EngineContext(
        engine=engine,
        precision=PrecisionConfig(),
        global_batch_size=20,
        micro_batch_size=2,
        world_size=2,
        device=torch.device("cpu"),
        planned=True,
        builder=ElasticEngines(),
    )
    return prepare(nn.Sequential(nn.Linear(5, 4)), context)
