"""What an accumulator saves and holds, parameters without a gradient, and collectives that some ranks do not call."""

import io
import warnings
from collections.abc import Callable
from copy import copy, deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)
from torch.utils.data import DataLoader

from distaccum import Accumulator
from distaccum import functional as da
from distaccum.accumulation.tracker import WINDOWS
from distaccum.config.engine import DDPConfig, EngineConfig, FSDP2Config
from distaccum.data.counter import GlobalCounter
from distaccum.distributed.world import World
from distaccum.errors import ConfigError, MisuseError, PeerError, UntrainedParameterWarning
from tests.support.accumulators import over_sgd, weights
from tests.support.schedule_free import ScheduleFree, averaged
from tests.support.threads import run_ranks

DATA: Any = [torch.tensor([float(i), 1.0]) / 8 for i in range(16)]
Schedulers = Callable[[torch.optim.Optimizer], Any]


def _loss(model: nn.Module, batch: Tensor) -> Tensor:
    total: Tensor = (model(batch) - 1).square().sum()
    return total


def _make(
    world: World,
    scheduler: Schedulers | None = None,
    optimizer: Any = torch.optim.AdamW,
    lr: float = 0.1,
    weight_decay: float = 0.01,
    **options: Any,
) -> tuple[Accumulator, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    more = {"weight_decay": weight_decay} if optimizer is torch.optim.AdamW else {}
    made = optimizer(model.parameters(), lr=lr, **more)
    schedulers = scheduler(made) if scheduler else None
    sizes: Any = {"global_batch_size": 4, "micro_batch_size": 2, "count": len}
    acc = Accumulator(model, made, scheduler=schedulers, world=world, **(sizes | options))
    return acc, made, schedulers


def _run(acc: Accumulator, windows: int, data: Any = DATA) -> None:
    while windows:
        for window in acc.windows(data):
            for micro in window:
                with acc.accumulate():
                    acc.backward(_loss(acc.model, micro.batch))
            windows -= 1
            if not windows:
                return


def _through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_a_state_is_a_copy(gloo_world: World) -> None:
    """Loading it again rolls back weights, moments and clocks alike."""
    acc, _, _ = _make(gloo_world, lambda optimizer: ExponentialLR(optimizer, 0.9))
    _run(acc, 2)
    state, before = acc.state_dict(), weights(acc)
    for _ in range(2):
        _run(acc, 3)
        after = weights(acc)
        acc.load_state_dict(state)
        assert torch.equal(weights(acc), before)
        assert acc.progress.step == 2
        _run(acc, 3)
        assert torch.equal(weights(acc), after)
        older = {name: value for name, value in state.items() if name not in ("batch", "memory", "spikes")}
        acc.load_state_dict(older)  # saved before there were these


def test_a_state_takes_the_memory_of_what_it_holds(gloo_world: World) -> None:
    acc, _, _ = _make(gloo_world)
    _run(acc, 1)
    state = acc.state_dict()
    live = {p.data_ptr() for p in acc.engine.unwrapped_model.parameters()}
    tensors = [*state["model"].values(), *state["optimizer"].values()]
    assert not live & {tensor.data_ptr() for tensor in tensors}
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors)  # no buffer hangs on


@pytest.mark.parametrize("schedule", ["by hand", "a scheduler of one's own"])
def test_a_learning_rate_set_by_hand_is_saved(gloo_world: World, schedule: str) -> None:
    def lower(optimizer: Any) -> None:
        if schedule == "by hand":
            optimizer.param_groups[0]["lr"] = 0.01
        else:
            plateau = ReduceLROnPlateau(optimizer, factor=0.1, patience=0)
            for loss in (1.0, 2.0):
                plateau.step(loss)

    whole, optimizer, _ = _make(gloo_world)
    _run(whole, 2)
    lower(optimizer)
    state = _through_a_file(whole.state_dict())
    _run(whole, 2)
    resumed, optimizer, _ = _make(gloo_world)
    resumed.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
    _run(resumed, 2)
    assert torch.equal(weights(whole), weights(resumed))


class Precise(torch.optim.SGD):
    """Steps weights in fp64, of which the model has a copy in fp32."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    if not self.state[parameter]:
                        self.state[parameter] = {"master": parameter.double(), "more": [parameter.double()]}
                    kept = self.state[parameter]
                    for weights in (kept["master"], *kept["more"]):
                        weights.add_(parameter.grad.double(), alpha=-group["lr"])
                    parameter.copy_(kept["master"])


@pytest.mark.parametrize("engine", ["ddp", "zero1"])
def test_what_is_kept_in_twice_the_precision_goes_on_in_it(gloo_world: World, engine: str) -> None:
    """Torch would cast it to its parameter's type, and the next steps round otherwise."""
    whole, *_ = _make(gloo_world, optimizer=Precise, lr=1e-3, engine=engine)
    _run(whole, 4)
    state = deepcopy(whole.state_dict())
    _run(whole, 4)
    resumed, made, _ = _make(gloo_world, optimizer=Precise, lr=1e-3, engine=engine)
    resumed.load_state_dict(state)
    _run(resumed, 4)
    for ours, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    kept = [value for entry in made.state.values() for value in (entry["master"], *entry["more"])]
    assert {value.dtype for value in kept} == {torch.float64}


def test_a_setting_that_was_not_changed_is_the_programs(gloo_world: World) -> None:
    first, optimizer, _ = _make(gloo_world, weight_decay=0.0)
    state = first.state_dict()
    assert not any(name.startswith("groups.") for name in state["optimizer_values"])  # what has changed, and no more
    optimizer.param_groups[0]["betas"] = (0.5, 0.5)
    changed = first.state_dict()
    first.load_state_dict(state)
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    second, optimizer, _ = _make(gloo_world, lr=0.2, weight_decay=0.5)
    second.load_state_dict(_through_a_file(changed))
    group = optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"], group["betas"]) == (0.2, 0.5, (0.5, 0.5))


def test_a_plateau_takes_the_metric(gloo_world: World) -> None:
    def plateau(optimizer: Any) -> Any:
        return ReduceLROnPlateau(optimizer, factor=0.5, patience=1)

    def train(acc: Accumulator, metrics: list[float]) -> None:
        for metric in metrics:
            _run(acc, 2)
            acc.scheduler_step(metric)

    metrics = [1.0, 2.0, 2.0, 2.0, 2.0]
    whole, optimizer, scheduler = _make(gloo_world, plateau)
    train(whole, metrics)
    assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**2
    first, _, _ = _make(gloo_world, plateau)
    train(first, metrics[:2])
    second, again, _ = _make(gloo_world, plateau)
    second.load_state_dict(_through_a_file(first.state_dict()))
    train(second, metrics[2:])
    assert again.param_groups[0]["lr"] == 0.1 * 0.5**2
    assert torch.equal(weights(whole), weights(second))
    with pytest.raises(MisuseError, match=r"by hand: write acc\.scheduler_step\(metric\)"):
        scheduler.step(1.0)
    with pytest.raises(MisuseError, match=r"scheduler_step\(\) without a ReduceLROnPlateau"):
        _make(gloo_world)[0].scheduler_step(1.0)


SCHEDULERS: list[Schedulers] = [
    lambda optimizer: ExponentialLR(optimizer, 0.9),
    lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (step + 1)),
    lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=20),
    lambda optimizer: SequentialLR(optimizer, [LinearLR(optimizer), CosineAnnealingLR(optimizer, 9)], milestones=[3]),
    ReduceLROnPlateau,
]


@pytest.mark.parametrize("make", SCHEDULERS)
def test_a_schedulers_own_state_can_be_loaded_safely(gloo_world: World, make: Schedulers) -> None:
    model = nn.Linear(2, 1)
    untouched = make(torch.optim.SGD(model.parameters(), lr=0.1))
    acc, _, scheduler = _make(gloo_world, make, torch.optim.SGD)
    assert scheduler.state_dict().keys() == untouched.state_dict().keys()
    _run(acc, 5)
    _through_a_file(scheduler.state_dict())
    _through_a_file(acc.state_dict())
    assert isinstance(scheduler, type(untouched))
    with pytest.raises(MisuseError, match="by hand"):
        scheduler.step()
    for copied in (copy(scheduler), deepcopy(scheduler)):
        assert type(copied) is type(untouched)
        assert copied.last_epoch == scheduler.last_epoch
        copied.step(*([1.0] if isinstance(copied, ReduceLROnPlateau) else []))  # nobody's
    acc.close()
    assert type(scheduler) is type(untouched)


def test_what_is_closed_is_as_before(gloo_world: World) -> None:
    acc, optimizer, scheduler = _make(gloo_world, lambda optimizer: ExponentialLR(optimizer, 0.5))
    model = acc.engine.unwrapped_model
    _run(acc, 1)
    acc.close()
    acc.close()
    for method in (acc.state_dict, lambda: next(iter(acc.windows(DATA)))):
        with pytest.raises(MisuseError, match=r"after close\(\): make a new Accumulator"):
            method()
    before = deepcopy(model.state_dict())
    optimizer.zero_grad()
    _loss(model, torch.stack(DATA)).backward()
    optimizer.step()
    scheduler.step()
    assert not torch.equal(before["weight"], model.weight)  # type: ignore[arg-type]
    assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**2
    again = Accumulator(
        model, optimizer, global_batch_size=8, micro_batch_size=2, count=len, scheduler=scheduler, world=gloo_world
    )
    _run(again, 1)
    assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**3


@pytest.mark.parametrize("engine", ["ddp", "zero1"])
def test_a_second_accumulator_over_the_same_is_refused(gloo_world: World, engine: str) -> None:
    acc, optimizer, scheduler = _make(gloo_world, lambda optimizer: ExponentialLR(optimizer, 0.9), engine=engine)
    model, sizes = acc.engine.unwrapped_model, {"global_batch_size": 8, "micro_batch_size": 2}
    _run(acc, 1)
    with pytest.raises(MisuseError, match=r"optimizer AdamW is in another Accumulator.*set_global_batch_size\(n\)"):
        Accumulator(model, optimizer, **sizes, engine=engine, world=gloo_world)
    fresh = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(MisuseError, match=r"the model Linear is in another Accumulator"):
        Accumulator(model, fresh, **sizes, engine=engine, world=gloo_world)
    _run(acc, 1)  # nothing is lost

    other = nn.Linear(2, 1)  # as in a GAN
    second = Accumulator(
        other, torch.optim.SGD(other.parameters(), lr=0.1), **sizes, count=len, engine=engine, world=gloo_world
    )
    _run(second, 1)
    third = nn.Linear(2, 1)
    with pytest.raises(MisuseError, match="scheduler ExponentialLR belongs to another Accumulator"):
        Accumulator(third, torch.optim.SGD(third.parameters()), **sizes, scheduler=scheduler, world=gloo_world)
    stranger = ExponentialLR(torch.optim.SGD(nn.Linear(2, 1).parameters()), 0.9)
    with pytest.raises(ConfigError, match="scheduler=ExponentialLR: it sets the learning rate of an optimizer that is"):
        Accumulator(third, torch.optim.SGD(third.parameters()), **sizes, scheduler=stranger, world=gloo_world)


def _averages(windows: int) -> Tensor:
    torch.manual_seed(0)
    model = averaged(nn.Linear(2, 1), _loss, DATA, windows)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_a_schedule_free_optimizer_is_evaluated_and_saved_with_its_averages(gloo_world: World) -> None:
    loader: Any = DataLoader(DATA, batch_size=2)
    acc, optimizer, _ = _make(gloo_world, optimizer=ScheduleFree)
    seen: list[Tensor] = []
    for k, window in enumerate(acc.windows(loader), 1):
        for micro in window:
            with acc.accumulate():
                acc.backward(_loss(acc.model, micro.batch))
        assert optimizer.param_groups[0]["train_mode"]
        if k == 2:
            state = _through_a_file(acc.state_dict())
            saved = torch.cat([tensor.flatten() for tensor in state["model"].values()])
            torch.testing.assert_close(saved, _averages(2), rtol=1e-5, atol=1e-7)
        if k == 3:  # an evaluation as one writes it
            acc.model.eval()
            with torch.no_grad():
                acc.model(torch.stack(DATA))
            seen.append(weights(acc))
            acc.model.train()
    torch.testing.assert_close(seen[0], _averages(3), rtol=1e-5, atol=1e-7)
    acc.use_evaluation_weights()
    torch.testing.assert_close(weights(acc), _averages(4), rtol=1e-5, atol=1e-7)

    resumed, _, _ = _make(gloo_world, optimizer=ScheduleFree)
    resumed.load_state_dict(state)
    _run(resumed, 2, loader)
    resumed.use_evaluation_weights()
    torch.testing.assert_close(weights(resumed), _averages(4), rtol=1e-5, atol=1e-7)
    with pytest.raises(ConfigError, match=r"optimizer=ScheduleFree: its train\(\) and eval\(\) replace the weights"):
        _make(gloo_world, optimizer=ScheduleFree, engine="zero1")


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"clip_norm": float("nan")}, "clip_norm=nan: must be a positive finite number"),
    ({"clip_norm": 0}, "clip_norm=0: must be a positive finite number"),
    ({"clip_norm": "1"}, "clip_norm=1: is no number"),
    ({"clip_norm": True}, "clip_norm=True: is no number"),
    ({"clip_value": -1}, "clip_value=-1: must be a positive finite number"),
    ({"clip_value": float("inf")}, "clip_value=inf: must be a positive finite number"),
    ({"global_batch_size": 1.5}, r"global_batch_size=1\.5: is no whole number"),
    ({"global_batch_size": "4"}, "global_batch_size=4: is no whole number"),
    ({"micro_batch_size": True}, "micro_batch_size=True: is no whole number"),
    ({"micro_batch_size": 0}, "micro_batch_size=0: must be at least 1"),
    ({"tokens": 10.5, "global_batch_size": None}, r"tokens=10\.5: is no whole number"),
    ({"seed": -1}, "seed=-1: out of range"),
    ({"seed": 0.5}, r"seed=0\.5: is no whole number"),
    ({"max_skips": 1.5}, r"max_skips=1\.5: is no whole number"),
    ({"prefetch": 2.5}, r"prefetch=2\.5: is no whole number"),
]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=[message for _, message in WRONG])
def test_levels_make_the_checks_of_the_configuration(gloo_world: World, options: dict[str, Any], message: str) -> None:
    for make in (_make,) if {"max_skips", "prefetch"} & options.keys() else (_make, _level_1):
        with pytest.raises(ConfigError, match=message):
            make(gloo_world, **options)


def _level_1(world: World, clip_norm: Any = None, clip_value: Any = None, **sizes: Any) -> None:
    model = nn.Linear(2, 1)
    da.create_engine(model, torch.optim.SGD(model.parameters()), world, clip_norm=clip_norm, clip_value=clip_value)
    da.plan_windows(DATA, world, count=len, **({"global_batch_size": 4, "micro_batch_size": 2} | sizes))


def test_whole_numbers_of_numpy_are_taken(gloo_world: World) -> None:
    sizes = {"global_batch_size": np.int64(4), "micro_batch_size": np.int32(2), "seed": np.uint8(3)}
    acc, _, _ = _make(gloo_world, clip_norm=np.float32(1.0), **sizes)
    _run(acc, 5)
    _through_a_file(acc.state_dict())
    assert acc.global_batch_size == 4


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
    acc = over_sgd(model, 0.01, (2, 2), count=len, world=world, engine=engine)
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


@pytest.mark.parametrize("counts", [1, {"a": 1, "b": 2}], ids=["one loss", "two losses"])
def test_a_collective_of_one_rank_alone_is_an_error_on_both(counts: Any) -> None:
    """``if acc.world.is_main: print(acc.mean_loss())`` made both ranks wait for each other."""
    width = 1 if isinstance(counts, int) else 2

    def run(world: Any) -> Any:
        counter = GlobalCounter(world, lambda _: counts)
        counter.all_reduce([counter.micro_batch(None)])
        assert counter.sum_together("mean_loss()", [1.0 + world.rank] * width) == [3.0] * width  # on both
        assert counter.sum_together("state_dict()") == []
        assert counter.sum_together("other()", [1.0] * (width + 3)) == [2.0] * (width + 3)
        if world.rank == 0:
            counter.sum_together("mean_loss()", [1.0] * width)
        return counter.all_reduce([counter.micro_batch(None)])

    found = run_ranks(2, run)
    assert [type(error) for error in found] == [MisuseError, PeerError]
    for error in found:
        assert "mean_loss() was called on some ranks alone" in str(error)
        assert "`value = acc.mean_loss()` before `if acc.world.is_main:`" in str(error)


@pytest.mark.parametrize("late", [True, False])
def test_counts_known_late_meet_it_too(late: bool) -> None:
    def run(world: Any) -> Any:
        counter = GlobalCounter(world, None if late else lambda _: 1)
        batches = [] if late else [counter.micro_batch(None)]
        counter.all_reduce(batches)
        assert counter.sum_together("mean_loss()", [2.0]) == [4.0]
        if world.rank == 1:
            counter.sum_together("mean_loss()", [2.0])
        return counter.all_reduce(batches)

    assert sorted(type(error).__name__ for error in run_ranks(2, run)) == ["MisuseError", "PeerError"]
