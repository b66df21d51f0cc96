"""``numerics=reproducible``: what is refused by name, what a window's counts add up to, and that its sums are right."""

import math
import random
from collections.abc import Iterator
from contextlib import nullcontext
from copy import deepcopy
from functools import reduce
from operator import add
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import SGD, AdamW
from torch.utils.data import DataLoader

from distaccum import Accumulator, DataSpec
from distaccum.config.batch import BatchConfig
from distaccum.config.compile import CompileConfig
from distaccum.config.engine import DDPConfig, DeepSpeedConfig, EngineConfig, FSDP2Config
from distaccum.config.precision import PrecisionConfig
from distaccum.data.counter import GlobalCounter
from distaccum.data.window import MicroBatch
from distaccum.distributed.world import World
from distaccum.engines.context import EngineContext
from distaccum.engines.factory import prepare
from distaccum.engines.numerics import Numerics, Reproducible
from distaccum.errors import ConfigError, DataError, MisuseError
from distaccum.functional import create_engine, plan_windows
from distaccum.testing import single_process_world
from tests.support.accumulators import Loss

SIZES: dict[str, Any] = {"global_batch_size": 8, "micro_batch_size": 2, "count": len}


@pytest.fixture
def world() -> Iterator[World]:
    with single_process_world() as opened:
        yield opened


def model_of(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), *layers, nn.Linear(4, 1))


def prepared(model: nn.Module | None = None, engine: EngineConfig | None = None, **options: Any) -> Any:
    given: dict[str, Any] = {
        "engine": engine or DDPConfig(),
        "precision": PrecisionConfig(),
        "global_batch_size": 8,
        "micro_batch_size": 2,
        "world_size": 1,
        "device": torch.device("cpu"),
        "numerics": Numerics.of("reproducible"),
    }
    return prepare(model or model_of(), EngineContext(**given | options))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"engine": DeepSpeedConfig()}, "deepspeed sums gradients over ranks in an order of its own"),
        ({"engine": FSDP2Config(sync="every")}, "engine.sync=every adds up gradients in an order"),
        ({"engine": FSDP2Config(replicas=2), "world_size": 2}, "engine.replicas=2 adds up"),
        ({"engine": FSDP2Config(offload=True)}, "engine.offload=True adds up"),
        ({"compile": CompileConfig(name="blocks")}, "compile=blocks makes other code for shapes"),
        ({"precision": PrecisionConfig(reduce_dtype="bf16")}, "gradients that travel in 16 bits"),
        ({"model": model_of(nn.BatchNorm1d(4))}, "1 keeps statistics of the micro-batches that its rank has seen"),
        ({"model": model_of(nn.InstanceNorm1d(4, track_running_stats=True))}, "1 keeps statistics"),
        ({"model": model_of(nn.SyncBatchNorm(4))}, "1 keeps statistics"),
    ],
)
def test_what_sums_by_the_rank_is_refused_before_there_is_a_group(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=f"numerics=reproducible: .*{problem}"):
        prepared(**options)


@pytest.mark.parametrize("kind", [SGD, AdamW])
def test_a_kernel_of_one_pass_steps_a_shard_to_other_bits(kind: Any) -> None:
    model, settings = model_of(), FSDP2Config()
    momentum = {"momentum": 0.9} if kind is SGD else {}
    Reproducible().check_optimizers([kind(model.parameters(), 0.1, foreach=True, **momentum)], settings)
    before = torch.get_rng_state()
    with pytest.raises(ConfigError, match="steps a part of a matrix to other bits than the whole, and fsdp2 steps"):
        Reproducible().check_optimizers([kind(model.parameters(), 0.1, fused=True, **momentum)], settings)
    assert torch.equal(torch.get_rng_state(), before)


def test_each_group_is_tried() -> None:
    groups = [{"params": [nn.Parameter(torch.ones(4, 4))]}, {"params": [nn.Parameter(torch.ones(4, 4))], "fused": True}]
    with pytest.raises(ConfigError, match="AdamW steps a part of a matrix to other bits"):
        Reproducible().check_optimizers([AdamW(groups, 0.1, foreach=False)], FSDP2Config())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
def test_a_model_that_is_compiled_already_is_refused() -> None:
    forward: Any = nn.Linear(3, 1)
    forward.forward = torch.compile(forward.forward)
    for compiled in (torch.compile(nn.Linear(3, 1)), forward):
        with pytest.raises(ConfigError, match=r"the model is given to torch\.compile"):
            prepared(nn.Sequential(compiled))


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch 2.8 has no Muon")
def test_a_rule_of_whole_matrices_is_not_for_shards() -> None:
    matrices = [nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4, 4))]
    given = [SGD(matrices[:1], 0.1), torch.optim.Muon(matrices[1:])]
    assert Reproducible().check_optimizers(given, FSDP2Config()) == {(1, 0)}


def test_a_unit_is_a_micro_batch_and_a_norm_without_running_statistics_is_taken() -> None:
    assert prepared(model_of(nn.BatchNorm1d(4, track_running_stats=False))).numerics.fixed_order
    assert BatchConfig(unit_size=4).first_micro_size == 4
    assert BatchConfig(unit_size=4, micro_size="auto").rehearses is False


def test_a_loop_of_your_own_needs_what_bits_depend_on(world: World) -> None:
    model = model_of()
    given: dict[str, Any] = {"numerics": "reproducible", "world": world}
    with pytest.raises(ConfigError, match="torch may choose kernels that add in any order"):
        Accumulator(model, SGD(model.parameters(), 0.1), **SIZES, **given)
    with pytest.raises(ConfigError, match="a window's count is known before it is run"):
        Accumulator(model, SGD(model.parameters(), 0.1), **(SIZES | {"count": None}), **given)


@pytest.mark.usefixtures("deterministic")
def test_streams_have_no_units(world: World) -> None:
    model = model_of()
    acc = Accumulator(model, SGD(model.parameters(), 0.1), **SIZES, numerics="reproducible", world=world)
    with pytest.raises(ConfigError, match="the data is a stream, of which each rank has its own samples"):
        next(acc.windows(iter([torch.ones(2, 3)])))


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        return self.layer(x)


class Assigning(Counting):
    """Has a buffer in place of which every forward puts another one."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + len(x)
        return self.layer(x)


class Hiding(Counting):
    """Changes its buffer by a way that moves no version."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen.data += len(x)
        return self.layer(x)


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.before = nn.Linear(3, 1), 0.0

    def forward(self, x: Tensor) -> Tensor:
        found = self.layer(x) + self.before
        self.before = float(x.mean())
        return found


class Generating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.generator = nn.Linear(3, 1), torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + torch.randn(1, generator=self.generator)


BUFFER, AGAIN = "a forward has changed the buffer seen", "the loss of a micro-batch is another one a second time"


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(
    ("kind", "verify", "said"),
    [
        *((kind, verify, BUFFER) for kind in (Counting, Assigning, Hiding) for verify in ("first", "never")),
        (Remembering, "never", AGAIN),
        (Generating, "never", AGAIN),
    ],
)
def test_what_a_model_keeps_between_two_forwards_ends_the_window_before_its_step(
    world: World, kind: Any, verify: str, said: str
) -> None:
    model = kind()
    given: dict[str, Any] = {"numerics": "reproducible", "world": world, "verify": verify}
    acc = Accumulator(model, SGD(model.parameters(), 0.1), **SIZES, **given)
    before = model.layer.weight.detach().clone()
    window = next(acc.windows(list(torch.randn(16, 3))))
    with pytest.raises(MisuseError, match=said):
        acc.step(window, Loss())
    assert torch.equal(model.layer.weight, before)


class OwnNoise:
    """Samples with noise of a generator that the dataset keeps."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def __len__(self) -> int:
        return 16

    def __getitem__(self, i: int) -> Tensor:
        return torch.full((3,), float(i)) + torch.randn(3, generator=self.generator)


class GlobalNoise(OwnNoise):
    def __getitem__(self, i: int) -> Tensor:
        return torch.full((3,), i + random.random()) + torch.randn(3) + float(np.random.standard_normal())  # noqa: NPY002, S311


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("workers", [0, 1])
def test_noise_that_a_dataset_keeps_is_found(world: World, workers: int) -> None:
    model = model_of()
    for data, fails in ((GlobalNoise(), False), (OwnNoise(), True)):
        acc = Accumulator(model, SGD(model.parameters(), 0.1), **SIZES, numerics="reproducible", world=world)
        loader = DataLoader(data, batch_size=2, num_workers=workers)
        with pytest.raises(DataError, match="another one when it is loaded a second") if fails else nullcontext():
            next(acc.windows(loader))
        acc.close()


@pytest.mark.usefixtures("deterministic")
def test_a_buffer_may_be_set_before_a_windows_first_micro_step(world: World) -> None:
    model = nn.Sequential(nn.Linear(3, 1))
    model.register_buffer("temperature", torch.ones(()))
    acc = Accumulator(model, SGD(model.parameters(), 0.1), **SIZES, numerics="reproducible", world=world)
    for number, window in enumerate(acc.windows(list(torch.randn(16, 3)))):
        model.temperature = torch.tensor(float(number))
        for micro in window:
            with acc.accumulate():
                acc.backward(acc.model(micro.batch).sum())
    assert acc.progress.step == 2


@pytest.mark.filterwarnings("ignore:precision=fp16")
@pytest.mark.usefixtures("deterministic")
def test_a_loss_scale_falls_for_a_window_that_is_abandoned_on_one_rank_alone(world: World) -> None:
    model = nn.Sequential(nn.Linear(3, 1))
    given: dict[str, Any] = {"numerics": "reproducible", "world": world, "precision": "fp16"}
    acc = Accumulator(model, SGD(model.parameters(), 0.1), **SIZES, **given)
    before = float(acc.engine.loss_scale)
    for _ in acc.windows(list(torch.randn(8, 3))):
        acc.abandon()
    assert float(acc.engine.loss_scale) == before / 2


@pytest.mark.usefixtures("deterministic")
def test_a_plan_and_an_engine_agree(world: World) -> None:
    model = model_of()
    engine = create_engine(model, SGD(model.parameters(), 0.1), world)
    window = next(plan_windows(list(torch.randn(8, 3)), world, **SIZES, numerics="reproducible")(0))
    with pytest.raises(MisuseError, match="this engine is not"):
        engine.begin_window(4, window.assignment)


@pytest.mark.usefixtures("deterministic")
def test_a_window_that_nobody_has_dealt_is_refused(world: World) -> None:
    model = model_of()
    engine = create_engine(model, SGD(model.parameters(), 0.1), world, numerics="reproducible")
    engine.begin_window(1)
    with engine.micro_step(sync=True), pytest.raises(MisuseError, match="nobody says which these are"):
        engine.backward(engine.model(torch.ones(2, 3)).sum())


@pytest.mark.usefixtures("deterministic")
def test_helpers_and_an_accumulator_compute_the_same_bits(world: World) -> None:
    data, found = DataSpec(train=list(torch.randn(20, 3))), []
    for level in (1, 2):
        torch.manual_seed(0)
        model = model_of(nn.Dropout(0.2))
        optimizer = SGD(model.parameters(), 0.1)
        if level == 1:
            engine = create_engine(model, optimizer, world, numerics="reproducible")
            for window in plan_windows(data, world, **SIZES, numerics="reproducible")(0):
                from distaccum.functional import run_window  # noqa: PLC0415

                run_window(engine, window, Loss())
            engine.close()
        else:
            acc = Accumulator(model, optimizer, **SIZES, numerics="reproducible", world=world)
            for window in acc.windows(data):
                for micro in window:
                    with acc.accumulate():
                        acc.backward(Loss()(acc.model, micro.batch))
            acc.close()
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*found)


def test_counts_that_are_no_whole_numbers_add_up_to_one_number_in_any_order(world: World) -> None:
    weights = torch.rand(200, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).tolist()
    counter = GlobalCounter(world, float, exact=True)
    totals = set()
    for order in (weights, weights[::-1], sorted(weights)):
        counts, _ = counter.all_reduce([MicroBatch(None, {"loss": weight}) for weight in order])
        totals.add(counts["loss"])
    assert len(totals) == 1
    assert totals.pop() == pytest.approx(math.fsum(weights), rel=1e-15)
    plain = {reduce(add, order) for order in (weights, weights[::-1], sorted(weights))}  # no sum(): since 3.12 it mends
    assert len(plain) > 1


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(
    ("virtual_ranks", "engine"),
    [
        *((1, DDPConfig()), (3, DDPConfig()), (32, DDPConfig())),
        pytest.param(
            *(3, FSDP2Config(blocks=["0"])),
            marks=pytest.mark.skipif(not hasattr(FSDPModule, "set_custom_reduce_scatter"), reason="torch 2.8 cannot"),
        ),
    ],
    ids=["1", "3", "32", "fsdp2, its last layer frozen"],
)
def test_the_gradient_is_the_whole_batchs(world: World, virtual_ranks: int, engine: EngineConfig) -> None:
    model = model_of(nn.Tanh())
    model[-1].requires_grad_(isinstance(engine, DDPConfig))
    data = list(torch.randn(30, 3))
    exact, weights = deepcopy(model).double(), [p.detach().clone() for p in model.parameters()]
    sizes = SIZES | {"global_batch_size": 30}
    own: dict[str, Any] = {"engine": engine, "numerics": "reproducible", "virtual_ranks": virtual_ranks}
    acc = Accumulator(model, SGD(model.parameters(), 1.0), **sizes, **own, world=world)
    for window in acc.windows(data):
        acc.step(window, Loss())
    (Loss()(exact, torch.stack(data).double()) / 30).backward()
    stepped = acc.state_dict()["model"].values()
    for before, after, truth in zip(weights, stepped, exact.parameters(), strict=True):
        gradient = torch.zeros_like(truth) if truth.grad is None else truth.grad
        assert torch.allclose((before - after).double(), gradient, rtol=1e-4, atol=1e-6)
    acc.close()
