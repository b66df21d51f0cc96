"""Compiled forwards, in a gloo group of one: what is refused, what is counted, what is given back."""

from __future__ import annotations

import logging
import pickle
import warnings
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distaccum import Accumulator, CompileConfig, DDPConfig, FSDP2Config
from distaccum.config.engine import DeepSpeedConfig, EngineConfig, Zero1Config
from distaccum.distributed.world import World
from distaccum.engines import compiled
from distaccum.engines.compiled import CompiledForward
from distaccum.engines.factory import create_engine, prepare
from distaccum.errors import ConfigError, MisuseError

DATA: Any = list(torch.randn(8, 4, generator=torch.Generator().manual_seed(0)).unbind())
QUICK: dict[str, Any] = {"backend": "aot_eager"}


class Block(nn.Module):
    """One of those that are compiled by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Net(nn.Module):
    """Two blocks, and two outputs, of which a loss may leave one out."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.first, self.second = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.blocks:
            x = block(x)
        return self.first(x), self.second(x)


class Loss:
    """Of both outputs, or of the first alone."""

    def __init__(self, outputs: int = 2) -> None:
        self._outputs = outputs

    def count(self, batch: Tensor) -> int:
        return len(batch)

    def __call__(self, model: nn.Module, batch: Tensor) -> Tensor:
        outputs: list[Tensor] = model(batch)[: self._outputs]
        return torch.stack([output.square().sum() for output in outputs]).sum()


@pytest.fixture(autouse=True)
def compiler() -> Iterator[None]:
    """torch.compile without what another test has compiled, and without its own warnings as errors."""
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch._dynamo.reset()


def _check(
    model: nn.Module,
    compile: CompileConfig,  # noqa: A002
    engine: EngineConfig | None = None,
    precision: str = "fp32",
) -> None:
    nothing: Any = dict.fromkeys(("clip_norm", "clip_value", "global_batch_size", "micro_batch_size"))
    device = torch.device("cpu")
    prepare(
        model,
        engine=engine or DDPConfig(),
        precision=precision,
        **nothing,
        world_size=1,
        device=device,
        seed=0,
        compile=compile,
    )


def _accumulator(world: World, model: nn.Module, **options: Any) -> Accumulator:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5)
    sizes: Any = {"global_batch_size": 4, "micro_batch_size": 2, "count": Loss().count, "world": world}
    return Accumulator(model, optimizer, **sizes, **options)


@pytest.mark.parametrize(
    ("model", "engine", "given", "words"),
    [
        (Net(0), DDPConfig(), {"name": "blocks"}, "no blocks that could be told.*compile.blocks"),
        (Net(0), FSDP2Config(), {"name": "blocks"}, "no blocks that could be told.*engine.blocks"),
        (
            Net(),
            DDPConfig(),
            {"name": "blocks", "blocks": ["block.*"]},
            r"compile\.blocks=block\.\*: matches no module",
        ),
        (Net(), FSDP2Config(), {"name": "blocks", "blocks": ["first"]}, "compile.blocks.*engine=fsdp2.*engine.blocks"),
        (Net(), FSDP2Config(), {"name": "model"}, "compile=model: on engine=fsdp2.*compile=blocks"),
        (Net(), DeepSpeedConfig(stage=3), {"name": "model"}, "engine.stage=3.*engine=fsdp2"),
        (
            Net(),
            Zero1Config(),
            {"name": "model", "backend": "eagre"},
            "compile.backend=eagre: torch has no such",
        ),
    ],
)
def test_what_cannot_be_compiled_is_refused(model: nn.Module, engine: Any, given: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        _check(model, CompileConfig(**(QUICK | given)), engine)


def test_deepspeed_in_16_bits_is_not_compiled() -> None:
    """Torch does not trace what has a gradient of another format, and would run all of it as it is."""
    with pytest.raises(ConfigError, match="compile=blocks: on DeepSpeed in 16 bits"):
        _check(Net(), CompileConfig(name="blocks", **QUICK), DeepSpeedConfig(stage=1), "bf16")


@pytest.mark.parametrize("part", ["the model", "blocks.1"])
@pytest.mark.parametrize("how", ["around", "in place", "its forward"])
def test_a_model_that_is_compiled_already_is_refused(part: str, how: str) -> None:
    model: Any = Net()
    inside = model if part == "the model" else model.blocks[1]
    if how == "around" and inside is model:
        model = torch.compile(model, backend="eager")
    elif how == "around":
        model.blocks[1] = torch.compile(inside, backend="eager")
    elif how == "in place":
        inside.compile(backend="eager")
    else:
        inside.forward = torch.compile(inside.forward, backend="eager")
    with pytest.raises(ConfigError, match=f"compile=model: and {part} is compiled already"):
        _check(model, CompileConfig(name="model", **QUICK))


def test_a_missing_compiler_is_found_before_the_first_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.config  # noqa: PLC0415  seconds to import

    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", ("no-such-compiler",))
    with pytest.raises(ConfigError, match=r"compile.backend=inductor: needs a C\+\+ compiler"):
        _check(Net(), CompileConfig(name="model"))


def test_hooks_run_and_copies_compute_with_their_own_weights(gloo_world: World) -> None:
    model = Net()
    engine = create_engine(
        model, torch.optim.SGD(model.parameters()), gloo_world, compile=CompileConfig(name="blocks", backend="eager")
    )
    pickled = pickle.dumps(model.blocks[0])
    seen: list[nn.Module] = []
    for block in model.blocks:
        assert isinstance(vars(block)["forward"], CompiledForward)
        block.register_forward_hook(lambda module, *_: seen.append(module))
    x = torch.stack(DATA)
    expected = engine.model(x)[0]
    assert seen == list(model.blocks)
    assert list(engine.state().model) == list(Net().state_dict())
    for twin in (deepcopy(model.blocks), pickle.loads(pickled)):  # noqa: S301  made here
        module: Any = twin[0] if isinstance(twin, nn.ModuleList) else twin
        with torch.no_grad():
            module.linear.weight.zero_()
            module.linear.bias.zero_()
        assert torch.equal(module(x), x)
    assert torch.equal(engine.model(x)[0], expected)
    engine.close()
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_forward_of_the_users_own_is_compiled_and_given_back(gloo_world: World) -> None:
    model = Net()
    own = model.blocks[0].forward
    model.blocks[0].forward = lambda x: 2 * own(x)
    patched = model.blocks[0].forward
    x = torch.stack(DATA)
    expected = model(x)[0]
    named = CompileConfig(name="blocks", backend="eager")
    engine = create_engine(model, torch.optim.SGD(model.parameters()), gloo_world, compile=named)
    torch.testing.assert_close(engine.model(x)[0], expected)
    engine.close()
    assert model.blocks[0].forward is patched


@pytest.mark.parametrize("find_unused", [False, True])
def test_an_output_that_the_loss_leaves_out_is_no_gradient_of_zero(gloo_world: World, find_unused: bool) -> None:
    """Weight decay would move what it alone depends on, which without compiling is refused, or left out of the step."""
    model = Net()
    before = deepcopy(model.state_dict())
    named = CompileConfig(name="model", **QUICK)
    engine = DDPConfig(find_unused_parameters=find_unused)
    acc = _accumulator(gloo_world, model, engine=engine, compile=named)
    window = next(iter(acc.windows(DATA)))
    with pytest.raises(MisuseError, match=r"does not depend on second\.bias, second\.weight, and compiled code gives"):
        acc.step(window, Loss(outputs=1))
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in before)


def test_what_is_compiled_later_is_counted_and_told_once(
    gloo_world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "_MANY", 2)
    caplog.set_level(logging.INFO, "distaccum.engines.compiled")
    acc = _accumulator(gloo_world, Net(), verify="never", compile=CompileConfig(name="model", backend="eager"))
    found = []
    for length in (2, 2, 2, 3, 4, 5):
        data: Any = [torch.ones(length, 4) for _ in range(4)]
        for window in acc.windows(data):
            acc.step(window, Loss())
        found.append(acc.engine.recompiles)
    assert found == [0, 0, 0, 1, 2, 3]
    told = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert [level for level, _ in told] == ["INFO", "WARNING"]
    assert told[0][1] == "compiled 1 graphs of 1 parts in the first windows"
    assert told[1][1].startswith("2 graphs compiled after the first windows")
    assert _accumulator(gloo_world, Net()).engine.recompiles is None


def test_the_model_is_not_cut_at_the_ends_of_buckets(gloo_world: World) -> None:
    """Torch's DDPOptimizer does so for each micro-step, and takes no checkpoint."""
    graphs = []

    def counting(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.register_backend(compiler_fn=counting, name="counting")
    named = CompileConfig(name="model", backend="counting", fullgraph=True)
    acc = _accumulator(gloo_world, Net(), verify="never", engine=DDPConfig(bucket_cap_mb=1e-5), compile=named)
    for window in acc.windows(DATA):
        acc.step(window, Loss())
    assert len(graphs) == 1


class Broken(Net):
    """Asks the device in its forward."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first, second = super().forward(x)
        return (first, second) if float(first.sum()) < 1e9 else (second, first)


def test_a_forward_in_several_graphs_is_told(gloo_world: World, caplog: pytest.LogCaptureFixture) -> None:
    acc = _accumulator(gloo_world, Broken(), verify="never", compile=CompileConfig(name="model", backend="eager"))
    for window in acc.windows(DATA):
        acc.step(window, Loss())
    (told,) = [record.getMessage() for record in caplog.records if record.name == "distaccum.engines.compiled"]
    assert "in several graphs" in told
    assert "compile.fullgraph=true" in told
