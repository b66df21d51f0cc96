"""Compiled forwards, in a gloo group of one: what is refused, what is counted, what is given back."""

import logging
import pickle
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distaccum import Accumulator, CompileConfig, DDPConfig, FSDP2Config
from distaccum.config.engine import DeepSpeedConfig, EngineConfig, Zero1Config
from distaccum.config.precision import PrecisionConfig
from distaccum.distributed.world import World
from distaccum.engines import compiled
from distaccum.engines.compiled import CompiledMethod, copied
from distaccum.engines.context import EngineContext
from distaccum.engines.factory import create_engine, prepare
from distaccum.errors import ConfigError, MisuseError
from distaccum.losses.cross_entropy import CrossEntropy
from distaccum.losses.transformers import CausalLM, SequenceClassification
from distaccum.testing.counters import OperationCounter

pytestmark = [pytest.mark.usefixtures("compiler"), pytest.mark.filterwarnings("ignore")]  # torch's own warnings

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
    def __init__(self, outputs: int = 2) -> None:
        self._outputs = outputs

    def count(self, batch: Tensor) -> int:
        return len(batch)

    def __call__(self, model: nn.Module, batch: Tensor) -> Tensor:
        outputs: list[Tensor] = model(batch)[: self._outputs]
        return torch.stack([output.square().sum() for output in outputs]).sum()


def _check(
    model: nn.Module,
    compile: CompileConfig,  # noqa: A002
    engine: EngineConfig | None = None,
    precision: str = "fp32",
) -> EngineContext:
    context = EngineContext(
        engine=engine or DDPConfig(),
        precision=PrecisionConfig(name=precision),
        world_size=1,
        device=torch.device("cpu"),
        compile=compile,
    )
    return prepare(model, context)


def _noted(backend: str) -> list[torch.fx.GraphModule]:
    """The graphs that a backend of this name, which compiles nothing, will be given."""
    graphs: list[torch.fx.GraphModule] = []

    def noting(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.register_backend(compiler_fn=noting, name=backend)
    return graphs


def _accumulator(world: World, model: nn.Module, **options: Any) -> Accumulator:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5)
    sizes: Any = {"global_batch_size": 4, "micro_batch_size": 2, "count": Loss().count, "world": world}
    return Accumulator(model, optimizer, **sizes, **options)


@pytest.mark.parametrize(
    ("model", "engine", "given", "words"),
    [
        # Torch does not trace what has a gradient of another format, and would run all of it as it is.
        (Net(), DeepSpeedConfig(stage=1), {"name": "blocks", "precision": "bf16"}, "blocks: on DeepSpeed in 16 bits"),
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
        (Net(), Zero1Config(), {"name": "model", "backend": "eagre"}, "compile.backend=eagre: torch has no such"),
    ],
)
def test_what_cannot_be_compiled_is_refused(model: nn.Module, engine: Any, given: Any, words: str) -> None:
    settings = QUICK | given
    precision = settings.pop("precision", "fp32")
    with pytest.raises(ConfigError, match=words):
        _check(model, CompileConfig(**settings), engine, precision)


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


def test_a_missing_compiler_is_found_before_the_first_forward() -> None:
    import torch._inductor.config  # noqa: PLC0415  seconds to import

    # The configuration's own patch: pytest's deletes the name when it is undone, and then torch hides it for good.
    absent = torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)})
    with absent, pytest.raises(ConfigError, match=r"compile.backend=inductor: needs a C\+\+ compiler"):
        _check(Net(), CompileConfig(name="model"))


def test_hooks_run_and_copies_compute_with_their_own_weights(gloo_world: World) -> None:
    model = Net()
    engine = create_engine(
        model, torch.optim.SGD(model.parameters()), gloo_world, compile=CompileConfig(name="blocks", backend="eager")
    )
    pickled = pickle.dumps(model.blocks[0])
    seen: list[nn.Module] = []
    for block in model.blocks:
        assert isinstance(vars(block)["forward"], CompiledMethod)
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


@pytest.mark.slow
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
        assert acc.engine.compiled is not None
        found.append(acc.engine.compiled.recompiles)
    assert found == [0, 0, 0, 1, 2, 3]
    told = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert [level for level, _ in told] == ["INFO", "WARNING"]
    assert told[0][1] == "compiled 1 graphs of 1 parts in the first steps"
    assert told[1][1].startswith("2 graphs compiled after the first steps")
    assert _accumulator(gloo_world, Net()).engine.compiled is None


def test_the_model_is_not_cut_at_the_ends_of_buckets(gloo_world: World) -> None:
    """Torch's DDPOptimizer does so for each micro-step, and takes no checkpoint."""
    graphs = _noted("counting")
    named = CompileConfig(name="model", backend="counting", fullgraph=True)
    acc = _accumulator(gloo_world, Net(), verify="never", engine=DDPConfig(bucket_cap_mb=1e-5), compile=named)
    for window in acc.windows(DATA):
        acc.step(window, Loss())
    assert len(graphs) == 1


def test_a_mode_beside_what_is_compiled_compiles_it_no_more_than_once() -> None:
    """With torch 2.8 and 2.9 each call in it made another version; the ninth is an error, by ``fullgraph``."""

    class Watching(compiled.BesideCompiled):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return function(*args, **(kwargs or {}))

    graphs = _noted("beside")
    twice = torch.compile(lambda x: x.tanh() * 2, backend="beside", fullgraph=True)
    for _ in range(9):
        with Watching():
            assert torch.equal(twice(DATA[0]), DATA[0].tanh() * 2)
    twice(DATA[0])
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


# --- the loss


class OfOutputs(Loss):
    """Says what of it can be compiled: a method, or a module."""

    to_compile: Any = "total"

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.MSELoss(reduction="sum")

    def total(self, first: Tensor, second: Tensor) -> Tensor:
        return (first.square() + second.square()).sum()

    def __call__(self, model: nn.Module, batch: Tensor) -> Tensor:
        first, second = model(batch)
        if self.to_compile == "module":
            found: Tensor = self.module(first, -second)
            return found
        return self.total(first, second)


def _with(name: Any, cls: type = OfOutputs) -> Any:
    return type("Named", (cls,), {"to_compile": name})()


class Slots:
    """Has no room for another method in its place."""

    __slots__ = ()
    to_compile = "total"

    def total(self, output: Tensor) -> Tensor:
        return output.sum()


def _compiled_already(part: str) -> Any:
    loss = _with(part)
    if part == "module":
        loss.module.compile(backend="eager")
    else:
        loss.total = torch.compile(loss.total, backend="eager")
    return loss


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: _with("totals"), "to_compile=totals: names nothing of it"),
        (lambda: _with("__call__"), "to_compile=__call__: names nothing of it"),
        (lambda: _with(True), "to_compile=True: names nothing of it"),
        (Slots, "to_compile=total: cannot be replaced"),
        (lambda: _compiled_already("total"), "to_compile=total: is compiled already"),
        (lambda: _compiled_already("module"), "to_compile=module: is compiled already"),
    ],
)
def test_a_loss_that_cannot_be_compiled_is_refused(make: Callable[[], Any], words: str) -> None:
    loss = make()
    with pytest.raises(ConfigError, match=words):
        compiled.check_loss(loss, CompileConfig(name="blocks"))
    compiled.check_loss(loss, CompileConfig(name="blocks", loss=False))
    compiled.check_loss(loss, CompileConfig())


@pytest.mark.parametrize("part", ["total", "module"])
def test_a_loss_is_compiled_with_its_model_and_given_back(gloo_world: World, part: str) -> None:
    graphs = _noted(f"noting {part}")
    loss, model = _with(part), Net(1)
    named = CompileConfig(name="blocks", backend=f"noting {part}")
    acc = _accumulator(gloo_world, model, verify="never", compile=named)
    assert acc.engine.compiled is not None
    acc.engine.compiled.add_loss(loss)
    for window in acc.windows(DATA):
        acc.step(window, loss)
    assert len(graphs) == 2  # a block's, and the loss's
    twin = deepcopy(loss)
    acc.close()
    assert vars(loss).keys() == vars(OfOutputs()).keys()
    assert "forward" not in vars(loss.module)
    assert loss(model, DATA[0]) == twin(model, DATA[0]) > 0
    assert len(graphs) == 2  # neither of them is compiled any more


@pytest.mark.parametrize("loss", [CrossEntropy(chunk=2), CausalLM(chunk=2), Loss()])
def test_a_loss_that_names_nothing_stays_as_it_is(gloo_world: World, loss: Any) -> None:
    acc = _accumulator(gloo_world, Net(), compile=CompileConfig(name="blocks", **QUICK))
    assert acc.engine.compiled is not None
    before = dict(vars(loss))
    acc.engine.compiled.add_loss(loss)
    assert vars(loss) == before
    assert compiled.criterion_of(OfOutputs(), CompileConfig(name="blocks", loss=False)) == ""
    assert compiled.criterion_of(OfOutputs(), CompileConfig()) == ""


def test_what_is_given_the_model_is_no_part_to_compile(gloo_world: World) -> None:
    class Whole(OfOutputs):
        to_compile = "everything"

        def everything(self, model: nn.Module, batch: Tensor) -> Tensor:
            return super().__call__(model, batch)

        def __call__(self, model: nn.Module, batch: Tensor) -> Tensor:
            return self.everything(model, batch)

    loss, model = Whole(), Net()
    acc = _accumulator(gloo_world, model, verify="never", compile=CompileConfig(name="blocks", **QUICK))
    before = deepcopy(model.state_dict())
    assert acc.engine.compiled is not None
    acc.engine.compiled.add_loss(loss)
    window = next(iter(acc.windows(DATA)))
    with pytest.raises(MisuseError, match=r"Whole\.everything is named by to_compile, and called with a module"):
        acc.step(window, loss)
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in before)


class Given(nn.Module):
    """Gives the logits that it was made with, whatever it is asked."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, *_: Any, **__: Any) -> Tensor:
        return self.logits


def _labels(*shape: int) -> Tensor:
    labels = torch.randint(23, shape)
    labels[0, :2] = -100
    return labels


def _losses() -> dict[str, Any]:
    torch.manual_seed(0)
    labels, weights = _labels(4, 6), torch.rand(4)
    whole = {"labels": labels, "weights": weights}
    one = {"labels": torch.randint(2, (4, 3)).float(), "weights": weights}
    return {
        "cross entropy": (CrossEntropy(), (4, 6, 23), (labels, labels)),
        "weighted": (CausalLM(weights="weights"), (4, 6, 23), whole),
        "multi_label": (SequenceClassification(problem="multi_label", weights="weights"), (4, 3), one),
    }


def _of(loss: Any, logits: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    model = Given(logits)
    total = loss(model, batch)
    (gradient,) = torch.autograd.grad(total, [model.logits])
    return total.detach().double(), gradient.double()


def _kept(loss: Any, logits: Tensor, batch: Any) -> int:
    """The bytes that its backward needs."""
    found: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        found.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss(Given(logits), batch)
    return sum(found)


@pytest.mark.parametrize(
    ("backend", "names"),
    [
        ("aot_eager", ("cross entropy", "weighted", "multi_label")),
        pytest.param("inductor", ("cross entropy",), marks=pytest.mark.heavy),
    ],
)
def test_compiled_losses_are_as_near_to_the_true_ones_as_eager_ones(
    backend: str, names: tuple[str, ...], gloo_world: World
) -> None:
    acc = _accumulator(gloo_world, Net(), compile=CompileConfig(name="model", backend=backend, fullgraph=True))
    assert acc.engine.compiled is not None
    for name in names:
        loss, shape, batch = _losses()[name]
        logits = 3 * torch.randn(shape)
        truth = _of(loss, logits.double(), batch)
        for dtype in (torch.float32, torch.bfloat16):
            given = logits.to(dtype)
            exact = truth if dtype is torch.float32 else _of(loss, given.double(), batch)
            eager = _of(loss, given, batch)
            acc.engine.compiled.add_loss(loss)
            found, kept = _of(loss, given, batch), _kept(loss, given, batch)
            acc.engine.compiled.undo()
            if backend == "inductor":  # logits as they came, labels, and two numbers a row
                assert kept <= given.nbytes + 16 * given[..., 0].numel()
            for one, other, true in zip(found, eager, exact, strict=True):
                error, plain = float((one - true).norm() / true.norm()), float((other - true).norm() / true.norm())
                print(f"{backend} {name} {dtype}: error {error:.1e}, eager {plain:.1e}")
                assert error <= max(3 * plain, torch.finfo(torch.float32).eps), name


@pytest.mark.heavy
@pytest.mark.parametrize("label", [23, -1])
def test_a_label_out_of_bounds_is_an_error_of_compiled_code_too(gloo_world: World, label: int) -> None:
    acc = _accumulator(gloo_world, Net(), compile=CompileConfig(name="model"))
    assert acc.engine.compiled is not None
    loss, labels = CrossEntropy(), torch.full((2, 3), label)
    acc.engine.compiled.add_loss(loss)
    with pytest.raises(RuntimeError, match="out of bounds"):
        loss(Given(torch.randn(2, 3, 23)), (labels, labels))


def test_the_boundary_has_as_many_operators_for_any_model(gloo_world: World) -> None:
    """Three of which walk over gradients: there is nothing for a compiler to fuse."""
    found = []
    for blocks in (1, 6):
        model = Net(blocks)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        engine = create_engine(model, optimizer, gloo_world, clip_norm=1.0)
        for _ in range(2):  # the first begins the optimizer's state
            with engine.micro_step(sync=True):
                engine.backward(sum(output.sum() for output in engine.model(DATA[0])))
            with OperationCounter() as counter:
                engine.step()
        found.append(counter.counts["aten ops"])
        engine.close()
    assert found[0] == found[1] <= 20  # 16 with torch 2.13


# --- CUDA graphs


@pytest.mark.parametrize(
    ("engine", "name", "device", "words"),
    [
        (DDPConfig(), "model", "cpu", "compile.graphs=True: on a CPU, which has no CUDA graphs"),
        (FSDP2Config(), "blocks", "cuda", "compile.graphs=True: on engine=fsdp2"),
        (DeepSpeedConfig(stage=1), "model", "cuda", "compile.graphs=True: on engine=deepspeed"),
        (DDPConfig(find_unused_parameters=True), "model", "cuda", "compile.graphs=True: and engine.find_unused"),
    ],
)
def test_graphs_are_refused_where_they_cannot_be(engine: EngineConfig, name: str, device: str, words: str) -> None:
    named, model = CompileConfig(name=name, graphs=True), Net()
    context = replace(_check(model, CompileConfig()), engine=engine, compile=named, device=torch.device(device))
    with pytest.raises(ConfigError, match=words):
        compiled.check(model, [model], context)


def test_what_leaves_a_graph_is_a_copy_but_for_inputs() -> None:
    given, own = torch.ones(3), torch.ones(2, requires_grad=True)
    output = {"own": (own, own[:1]), "given": given[1:], "plain": [None, 2, "text"]}
    found: Any = copied(output, Net(), ((given,), {}))
    storage = own.untyped_storage().data_ptr()
    assert all(part.untyped_storage().data_ptr() != storage for part in found["own"])
    assert found["given"] is output["given"]
    assert found["plain"] == output["plain"]
    (gradient,) = torch.autograd.grad(found["own"][0].sum() + found["own"][1].sum(), [own])
    assert gradient.tolist() == [2, 1]
    with pytest.raises(MisuseError, match="Net returns a Loss, whose tensors the next micro-step overwrites"):
        copied((own, Loss()), Net(), ())


def test_graphs_are_of_micro_steps_alone(gloo_world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what stands in for inductor on a CPU: which version of a forward runs, and where micro-steps begin."""
    from torch._inductor import cudagraph_trees  # noqa: PLC0415  seconds to import

    ran: list[str] = []

    def compile_of(self: CompiledMethod, _: CompileConfig, mode: str) -> Any:
        def run(*args: Any) -> Any:
            ran.append(mode)
            return self.plain(*args)

        return run

    monkeypatch.setattr(CompiledMethod, "_compile", compile_of)
    model = Net()
    acc = _accumulator(gloo_world, model)
    acc.engine.compiled = compiled.Compiled([model], CompileConfig(name="model", graphs=True), tells=True)
    marks = cudagraph_trees.MarkStepBox.mark_step_counter
    for window in acc.windows(DATA):
        acc.step(window, Loss())
        assert acc.engine.compiled is not None
        acc.model(DATA[0])
    assert marks - cudagraph_trees.MarkStepBox.mark_step_counter == ran.count("reduce-overhead") == 4
    assert ran[:3] == ["default", "default", "default"]  # is the loss a sum?
    last = ran[-4:]
    assert last == ["default", "reduce-overhead", "reduce-overhead", "default"]
