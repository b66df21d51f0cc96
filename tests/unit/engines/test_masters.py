"""precision=bf16-weights: bf16 weights, fp32 masters, fp32 gradients, on one rank and on two.

Small whole numbers, of which bf16 rounds none, make the truth exact: it is written out here, in fp64.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from distaccum import Accumulator, DataSpec
from distaccum.checkpoint import state as checkpoint_state
from distaccum.checkpoint.store import CheckpointStore
from distaccum.config.compile import CompileConfig
from distaccum.config.engine import DDPConfig, EngineConfig, FSDP2Config, Zero1Config, engine_config
from distaccum.config.precision import PrecisionConfig
from distaccum.data.plan.shuffle import Shuffle
from distaccum.distributed.world import World
from distaccum.engines.base import Engine
from distaccum.engines.context import EngineContext
from distaccum.engines.factory import create_engine, prepare
from distaccum.engines.modules import full_tensor
from distaccum.engines.state import whole_state
from distaccum.errors import ConfigError, MisuseError
from distaccum.tools.export import DTYPES, export
from distaccum.tools.plan import volume
from distaccum.tools.plan.sharding import formats_of, sharding_of
from tests.support.threads import on_ranks

WEIGHTS = "bf16-weights"
ENGINES: dict[str, EngineConfig] = {"ddp": DDPConfig(), "zero1": Zero1Config(), "fsdp2": FSDP2Config()}
SEED = 3
GLOBAL_SIZE, SAMPLES = 16, 40  # windows of 16, 16 and 8: powers of two divide exactly
CELLS = [(name, world) for name in ENGINES for world in (1, 2, 4)]


class Net(nn.Module):
    """Two outputs of one layer each, so that every rank of zero1 has a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack((self.first(x), self.second(x)))


def _net(offset: float = 0.0) -> Net:
    """Whole numbers from 4 to 7, which a bf16 weight leaves behind for at least 1/64."""
    net, generator = Net(), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randint(4, 8, parameter.shape, generator=generator) + offset)
    return net


def _samples() -> list[tuple[Tensor, Tensor]]:
    """Each input has one 1, and each target is a whole number."""
    generator = torch.Generator().manual_seed(2)
    inputs = torch.eye(4)[torch.randint(4, (SAMPLES,), generator=generator)]
    targets = torch.randint(-3, 4, (SAMPLES, 2, 4), generator=generator).float()
    return list(zip(inputs, targets, strict=True))


DATA = DataSpec(train=_samples(), eval_dataset=None, description="whole numbers")  # type: ignore[arg-type]


def _linear(output: Tensor, targets: Tensor) -> Tensor:
    return (output * targets.transpose(0, 1)).sum()


def _square(output: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * (output - targets.transpose(0, 1)).square().sum()


def _accumulator(
    model: nn.Module, optimizer: Optimizer, world: World, engine: EngineConfig, micro: int = 3, **options: Any
) -> Accumulator:
    return Accumulator(
        model,
        optimizer,
        global_batch_size=GLOBAL_SIZE,
        micro_batch_size=micro,
        count=lambda batch: len(batch[0]),
        seed=SEED,
        world=world,
        engine=engine,
        **{"precision": WEIGHTS} | options,
    )


def _train(acc: Accumulator, loss: Callable[[Tensor, Tensor], Tensor], updates: int) -> None:
    end = acc.progress.step + updates
    while acc.progress.step < end:
        for window in acc.windows(DATA):
            for micro in window:
                inputs, targets = micro.batch
                with acc.accumulate():
                    acc.backward(loss(acc.model(inputs), targets))
            if acc.progress.step == end:
                return


def _masters(engine: Engine, world: World) -> dict[str, Tensor]:
    found = dict(whole_state(engine, world).model)
    assert all(tensor.dtype is torch.float32 for tensor in found.values())
    return found


def _truth(loss: str, updates: int, rate: float, offset: float) -> dict[str, Tensor]:
    """The masters after plain SGD on whole batches: fp64, one process, forwards with weights that bf16 has rounded."""
    masters = {name: p.detach().double() for name, p in _net(offset).named_parameters()}
    inputs, targets = (torch.stack(parts).double() for parts in zip(*_samples(), strict=True))
    begins = [*range(0, SAMPLES, GLOBAL_SIZE)]
    for step in range(updates):
        begin = begins[step % len(begins)]
        order = Shuffle(SAMPLES, seed=SEED, epoch=step // len(begins))(np.arange(SAMPLES))
        chosen = torch.from_numpy(order[begin : begin + GLOBAL_SIZE].astype("int64"))
        x, t = inputs[chosen], targets[chosen]
        for number, (name, master) in enumerate(masters.items()):
            weight = master.bfloat16().double()
            slope = t[:, number] if loss == "linear" else x @ weight.T - t[:, number]
            masters[name] = master - rate * slope.T @ x / len(x)
    return masters


@pytest.mark.parametrize(("name", "world"), CELLS)
def test_updates_that_bf16_has_no_digits_for_add_up_in_the_masters(name: str, world: int) -> None:
    """A bf16 weight of 4 and a rate of 2**-14 stand still; its master arrives exactly, over full and ragged windows."""

    def trained(world: World) -> dict[str, Tensor]:
        model = _net()
        acc = _accumulator(model, SGD(model.parameters(), lr=2.0**-14), world, ENGINES[name])
        _train(acc, _linear, 20)
        return _masters(acc.engine, world)

    truth = _truth("linear", 20, 2.0**-14, 0.0)
    for found in on_ranks(world, trained):
        assert all(torch.equal(found[key].double(), truth[key]) for key in truth)
    start = dict(_net().named_parameters())
    assert all(torch.equal(truth[key].bfloat16(), start[key].bfloat16()) for key in truth)  # all below its digits
    assert not any(torch.equal(truth[key], start[key].double()) for key in truth)


@pytest.mark.parametrize(("name", "world"), CELLS)
def test_the_gradient_is_that_at_the_weights_roundings(name: str, world: int) -> None:
    """Of masters that are a little more than whole numbers, whose roundings are whole: the window's gradient is, too.

    Micro-batches are 3 and 2 or 1 samples, and ranks have different numbers of them.
    """

    def trained(world: World) -> list[dict[str, Tensor]]:
        model = _net(2.0**-10)
        acc = _accumulator(model, SGD(model.parameters(), lr=2.0**-12), world, ENGINES[name])
        found = []
        for _ in range(2):
            _train(acc, _square, 1)
            found.append(_masters(acc.engine, world))
        return found

    for found in on_ranks(world, trained):
        for updates, masters in enumerate(found, 1):
            truth = _truth("square", updates, 2.0**-12, 2.0**-10)
            assert all(torch.equal(masters[key].double(), truth[key]) for key in truth)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", ["ddp", "zero1"])
def test_weights_are_their_masters_roundings_and_gradients_fp32(name: str, world: int) -> None:
    def trained(world: World) -> None:
        torch.manual_seed(world.rank)
        model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 4))
        optimizer = AdamW(model.parameters(), lr=1e-3)
        engine = create_engine(model, optimizer, world, engine=ENGINES[name], precision=WEIGHTS)

        def check() -> None:
            masters = _masters(engine, world)
            for key, weight in model.named_parameters():
                assert weight.dtype is torch.bfloat16
                assert weight.grad is not None
                assert weight.grad.dtype is torch.float32
                assert torch.equal(weight, masters[key].bfloat16())
            with engine.probe.stepped_groups:
                stepped = [p for group in optimizer.param_groups for p in group["params"]]
            assert all(p.dtype is torch.float32 for p in stepped)
            owned = [p for p in engine.probe.stepped.values() if p.dtype is torch.float32]
            assert {id(p) for p in stepped} == {id(p) for p in owned}

        check()
        before = _masters(engine, world)
        for factor in (1.0, 1.0, float("nan"), 1.0):
            kept = _masters(engine, world)
            for last in (False, True):
                with engine.micro_step(sync=last):
                    with engine.autocast():
                        loss = engine.model(torch.randn(3, 4)).float().square().sum() * factor
                    engine.backward(loss)
            output = engine.step()
            assert output.applied == (factor == 1.0)
            check()
            same = all(torch.equal(kept[key], value) for key, value in _masters(engine, world).items())
            assert same == (factor != 1.0)  # a skipped step changes no bit
        after = _masters(engine, world)
        assert not any(torch.equal(before[key], after[key]) for key in before)
        engine.close()
        for key, parameter in model.named_parameters():
            assert torch.equal(parameter, after[key])
        assert {id(p) for p in optimizer.state} == {id(p) for p in model.parameters()}
        assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True))

    on_ranks(world, trained)


@pytest.mark.parametrize(("name", "world"), [("ddp", 1), ("zero1", 2), ("fsdp2", 2)])
def test_a_resume_is_bitwise_and_other_precisions_take_the_masters(name: str, world: int) -> None:
    def resumed(world: World) -> None:
        def make(precision: str = WEIGHTS) -> Accumulator:
            model = _net(0.1)
            return _accumulator(model, AdamW(model.parameters(), lr=1e-3), world, ENGINES[name], precision=precision)

        acc = make()
        _train(acc, _square, 4)
        state, saved = whole_state(acc.engine, world), acc.state_dict()
        _train(acc, _square, 3)
        expected = _masters(acc.engine, world)
        again = make()
        again.load_state_dict(saved)
        _train(again, _square, 3)
        taken = make("fp32")
        taken.engine.load_state(state)
        for key, master in _masters(taken.engine, world).items():
            assert torch.equal(master, state.model[key])
        other = make()
        other.engine.load_state(whole_state(taken.engine, world))
        for key, master in _masters(other.engine, world).items():
            assert torch.equal(master, state.model[key])
            weight = full_tensor(dict(other.engine.unwrapped_model.named_parameters())[key].detach())
            assert torch.equal(weight.bfloat16(), master.bfloat16())
        found = _masters(again.engine, world)
        assert expected.keys() == found.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected), "not bit by bit"

    on_ranks(world, resumed)


@pytest.mark.parametrize(("name", "world"), [("ddp", 1), ("ddp", 2), ("zero1", 2), ("fsdp2", 1), ("fsdp2", 2)])
def test_exported_weights_are_the_masters_or_their_roundings(name: str, world: int, tmp_path: Path) -> None:
    def saved(world: World) -> Path:
        model = _net()
        acc = _accumulator(model, SGD(model.parameters(), lr=2.0**-6), world, ENGINES[name])
        _train(acc, _linear, 20)
        run = checkpoint_state.RunState(progress=acc.progress, position={}, wandb_id="", config={}, callbacks={})
        write = checkpoint_state.Part.of(acc.engine, run, None, world).write
        return CheckpointStore(tmp_path / "checkpoints", keep=0).save(20, world, write)

    checkpoint = on_ranks(world, saved)[0]
    truth = _truth("linear", 20, 2.0**-6, 0.0)
    start = dict(_net().named_parameters())
    for key, exact in truth.items():  # bf16 has not all of its digits, and some that have moved
        assert torch.equal(exact.float().double(), exact)
        assert not torch.equal(exact.bfloat16().double(), exact)
        assert not torch.equal(exact.bfloat16(), start[key].bfloat16())
    for asked, dtype in {None: torch.float32, **DTYPES}.items():
        file, folder = tmp_path / f"{asked}.safetensors", tmp_path / f"{asked}"
        assert export(checkpoint, file, dtype=asked) == export(checkpoint, folder, dtype=asked) == len(truth)
        for found in (load_file(file), load_file(folder / "model.safetensors")):
            assert found.keys() == truth.keys()
            assert {tensor.dtype for tensor in found.values()} == {dtype}
            assert all(torch.equal(found[key], exact.to(dtype)) for key, exact in truth.items())


@pytest.mark.parametrize(("name", "bytes_each"), [("ddp", 2 + 4 + 4 + 8), ("zero1", 2 + 4 + (4 + 8) / 2)])
def test_a_rank_holds_the_bytes_of_the_zero_paper(name: str, bytes_each: float) -> None:
    """Weights 2, gradients 4, masters 4 and Adam's moments 8 for each element, the last two on a rank each of zero1."""
    config = ENGINES[name]
    formats = formats_of(config, PrecisionConfig(name=WEIGHTS))

    def held(world: World) -> float:
        model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
        optimizer = AdamW(model.parameters(), lr=1e-3)
        engine = create_engine(model, optimizer, world, engine=config, precision=WEIGHTS)
        with engine.micro_step(sync=True):
            engine.backward(engine.model(torch.ones(2, 64).bfloat16()).float().sum())
        engine.step()
        tensors = [*model.parameters(), *engine.probe.stepped.values(), *(p.grad for p in model.parameters())]
        tensors += [t for state in optimizer.state.values() for t in state.values() if t.numel() > 1]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}
        return sum(storages.values()) / (2 * 64 * 64)

    assert on_ranks(2, held) == [bytes_each] * 2
    parts = volume.memory(sharding_of(config), 1, 2, formats)
    forecast = parts["parameters"] + parts["optimizer"] + parts["gradients at the boundary"]
    assert forecast + volume.copied(sharding_of(config), 1, 2, formats) == bytes_each


@pytest.mark.parametrize("name", ["ddp", "zero1"])
def test_keep_fp32_and_frozen_parameters_are_their_own_masters(name: str, gloo_world: World) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    model[2].bias.requires_grad_(False)
    precision = PrecisionConfig(name=WEIGHTS, keep_fp32=["1"])
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    engine = create_engine(model, optimizer, gloo_world, engine=name, precision=precision)
    types = {name: p.dtype is torch.bfloat16 for name, p in model.named_parameters()}
    assert types == {
        f"{i}.{key}": (i, key) in ((0, "weight"), (0, "bias"), (2, "weight"))
        for i in range(3)
        for key in ("weight", "bias")
    }
    for _ in range(2):
        with engine.micro_step(sync=True):
            with engine.autocast():
                loss = engine.model(torch.randn(3, 4)).float().square().sum()
            engine.backward(loss)
        assert engine.step().applied
    assert all(
        (engine.probe.stepped[name] is p) != types[name] for name, p in model.named_parameters() if p.requires_grad
    )


def test_what_a_window_does_not_use_does_not_move(gloo_world: World) -> None:
    model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    model.forward = model[0].forward  # type: ignore[method-assign]
    optimizer = AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    config = DDPConfig(find_unused_parameters=True)
    engine = create_engine(model, optimizer, gloo_world, engine=config, precision=WEIGHTS)
    before = {name: master.detach().clone() for name, master in engine.probe.stepped.items()}
    for _ in range(2):
        for last in (False, True):
            with engine.micro_step(sync=last):
                engine.backward(engine.model(torch.randn(2, 3).bfloat16()).float().square().sum())
        assert engine.step().applied
    moved = {name: not torch.equal(before[name], master) for name, master in engine.probe.stepped.items()}
    assert moved == {"0.weight": True, "0.bias": True, "1.weight": False, "1.bias": False}


def test_weights_that_are_changed_by_hand_go_to_their_masters_element_by_element(gloo_world: World) -> None:
    model = nn.Linear(4, 1, bias=False)
    engine = create_engine(model, SGD(model.parameters(), lr=1.0), gloo_world, precision=WEIGHTS)
    master = engine.probe.stepped["weight"].detach().clone()
    with torch.no_grad():
        model.weight[0, 1] = 0.75  # which no first weight rounds to
    master[0, 1] = 0.75
    with engine.micro_step(sync=True):
        engine.backward(engine.model(torch.zeros(1, 4).bfloat16()).float().sum())
    engine.step()
    assert torch.equal(engine.probe.stepped["weight"], master)
    assert torch.equal(model.weight, master.bfloat16())


def test_an_optimizer_that_steps_the_weights_themselves_is_found_out(gloo_world: World) -> None:
    class Keeps(SGD):
        def __init__(self, parameters: Any) -> None:
            self.mine = list(parameters)
            super().__init__(self.mine, lr=1.0)

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            for parameter in self.mine:
                parameter.sub_(1.0)

    model = nn.Linear(2, 1)
    engine = create_engine(model, Keeps(model.parameters()), gloo_world, precision=WEIGHTS)
    with engine.micro_step(sync=True):
        engine.backward(engine.model(torch.ones(1, 2).bfloat16()).float().sum())
    with pytest.raises(MisuseError, match=r"not the fp32 masters.*precision=bf16"):
        engine.step()


def _prepared(
    model: nn.Module,
    engine: str | EngineConfig = "ddp",
    compile: str = "none",  # noqa: A002  torch's own word
    **precision: Any,
) -> None:
    context = EngineContext(
        engine=engine_config(engine),
        precision=PrecisionConfig(**{"name": WEIGHTS} | precision),
        world_size=1,
        device=torch.device("cpu"),
        compile=CompileConfig.of(compile),
    )
    prepare(model, context)


class _Variables(nn.Linear):
    computes_with_variables = True

    def __init__(self) -> None:
        super().__init__(2, 2)


REFUSED: Mapping[str, tuple[Callable[[], object], str]] = {
    "a model in bf16": (
        lambda: _prepared(nn.Linear(2, 2).bfloat16(), name="bf16"),
        r"model=Linear: .* are bfloat16 .*precision=bf16-weights has the weights in bf16 beside fp32 masters",
    ),
    "variables of Keras": (lambda: _prepared(_Variables()), r"precision=bf16-weights: .*variables.*precision=bf16"),
    "torch.compile": (
        lambda: _prepared(nn.Linear(2, 2), "zero1", compile="model"),
        r"compile=model: .*bf16 weights.*compile=none, precision=bf16, or engine=fsdp2",
    ),
    "chosen modules": (lambda: _prepared(nn.Linear(2, 2), only=["0"]), r"precision\.only.*precision\.keep_fp32"),
    "a wide gather": (
        lambda: _prepared(nn.Linear(2, 2), FSDP2Config(gather_dtype="fp32")),
        r"engine\.gather_dtype=fp32.*compute",
    ),
    "fp32 in a shard": (
        lambda: _prepared(nn.Sequential(nn.Linear(2, 2)), "fsdp2", keep_fp32=["0"]),
        r"precision\.keep_fp32.*ddp or zero1",
    ),
    "DeepSpeed": (lambda: _prepared(nn.Linear(2, 2), "deepspeed"), r"precision=bf16-weights.*ddp, zero1 or fsdp2"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_it_does_not_do_is_refused_by_name(case: str) -> None:
    refused, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        refused()


def test_parameters_and_optimizers_without_fp32_masters_are_refused(gloo_world: World) -> None:
    model = nn.Linear(2, 2).double()
    with pytest.raises(ConfigError, match=r"precision=bf16-weights: its parameter weight is float64"):
        create_engine(model, SGD(model.parameters(), lr=1.0), gloo_world, precision=WEIGHTS)
    plain = nn.Linear(2, 2)
    outer = SGD(plain.parameters(), lr=1.0)
    vars(outer)["inner"] = SGD(plain.parameters(), lr=1.0)
    with pytest.raises(ConfigError, match=r"an optimizer inside.*precision=bf16"):
        create_engine(plain, outer, gloo_world, precision=WEIGHTS)
