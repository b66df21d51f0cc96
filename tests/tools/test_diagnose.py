"""Where a window's gradient stopped being finite, through the real engine in a gloo group of one."""

import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from distaccum.accumulation.step import run_window
from distaccum.config.engine import DDPConfig
from distaccum.config.precision import PrecisionConfig, ScalerConfig
from distaccum.data.window import MicroBatch, Window
from distaccum.distributed.world import World
from distaccum.engines.context import EngineContext
from distaccum.engines.ddp.engine import DDPEngine
from distaccum.engines.ddp.reducer import BucketReducer
from distaccum.engines.ddp.stepper import WholeStepper
from distaccum.tools.diagnose import NonFinite, Stage, diagnose, explain

FP32 = PrecisionConfig()


class Net(nn.Module):
    """Two linear layers, in between whatever a test wants; named modules at two depths."""

    def __init__(self, between: nn.Module | None = None) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 2, bias=False), between or nn.Identity())
        self.head = nn.Linear(2, 1, bias=False)
        nn.init.ones_(self.body[0].weight)
        nn.init.ones_(self.head.weight)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.body(x))


class Lambda(nn.Module):
    """A module of one function."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


class Sum:
    """The sum of what the model gives."""

    def __init__(self, function: Callable[[Tensor], Tensor] = torch.Tensor.float) -> None:
        self.function = function

    def count(self, batch: Tensor) -> int:
        return len(batch)

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        return self.function(model(batch)).sum()


def _engine(
    model: nn.Module, world: World, *, precision: PrecisionConfig = FP32, find_unused_parameters: bool = False
) -> DDPEngine:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = DDPConfig(find_unused_parameters=find_unused_parameters)
    context = EngineContext(engine=config, precision=precision, world_size=world.size, device=world.device)
    reducer = BucketReducer(world, context.policy.reduce_dtype)
    return DDPEngine(model, [optimizer], world, context, reducer=reducer, stepper=WholeStepper())


def _window(batches: Sequence[Any]) -> Window:
    """Micro-batches of two samples, numbered from 10."""
    micro_batches = [MicroBatch(batch, {"loss": 2.0}) for batch in batches]
    total = 2.0 * len(batches)
    return Window(
        epoch=0,
        samples=int(total),
        counts={"loss": total},
        micro_batches=micro_batches,
        data_wait_s=0.0,
        ids=lambda: [(10 + 2 * i, 11 + 2 * i) for i in range(len(batches))],
    )


def _fp16(scale: float) -> PrecisionConfig:
    return PrecisionConfig(name="fp16", scaler=ScalerConfig(static_scale=scale))


def _diagnose(
    model: nn.Module, batches: Sequence[Any], world: World, *, loss: Any = None, precision: PrecisionConfig = FP32
) -> tuple[NonFinite, ...]:
    return diagnose(_engine(model, world, precision=precision), _window(batches), loss or Sum(), world)


def _found(stage: Stage, module: str, *parameters: str, micro_batch: int = 1) -> tuple[NonFinite]:
    samples = (10 + 2 * micro_batch, 11 + 2 * micro_batch)
    finding = NonFinite(
        rank=0, micro_batch=micro_batch, samples=samples, stage=stage, module=module, parameters=parameters
    )
    return (finding,)


ONES = torch.ones(2, 2)
BOTH = ("head.weight", "body.0.weight")


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_an_input(gloo_world: World, value: float) -> None:
    bad = torch.tensor([[1.0, 1.0], [1.0, value]])
    assert _diagnose(Net(), [ONES, bad, bad], gloo_world) == _found(Stage.INPUT, "", *BOTH)


def test_inputs_are_looked_at_wherever_they_are_in_a_batch(gloo_world: World) -> None:
    class Loss(Sum):
        def __call__(self, model: nn.Module, batch: Any) -> Tensor:
            x, rest = batch
            return (super().__call__(model, x) * rest["weights"][0]).sum()

    batches = [(ONES, {"ids": torch.arange(2), "weights": [torch.tensor([1.0, w])]}) for w in (1.0, torch.nan)]
    assert _diagnose(Net(), batches, gloo_world, loss=Loss()) == _found(Stage.INPUT, "", *BOTH)


def test_a_parameter(gloo_world: World) -> None:
    model = Net()
    engine = _engine(model, gloo_world)
    with torch.no_grad():
        model.head.weight[0, 1] = torch.nan
    found = diagnose(engine, _window([ONES, ONES]), Sum(), gloo_world)
    # The gradient of the head itself is its input, which is finite.
    assert found == _found(Stage.PARAMETER, "head", "body.0.weight", micro_batch=0)


def test_an_overflow_of_half_precision_in_an_inner_module(gloo_world: World) -> None:
    """200 * 200 is beyond fp16 once two of them are added; in fp32 there is nothing to find."""
    batches = [ONES, 200 * ONES]

    def model() -> Net:
        net = Net(nn.Sequential(nn.Linear(2, 2, bias=False), nn.LayerNorm(2)))
        nn.init.constant_(net.body[1][0].weight, 200.0)  # type: ignore[index]
        return net

    (found,) = _diagnose(model(), batches, gloo_world, precision=_fp16(1.0))
    assert (found.stage, found.module, found.micro_batch) == (Stage.FORWARD, "body.1.0", 1)
    assert found.parameters[0] == "head.weight"
    assert _diagnose(model(), batches, gloo_world) == ()


@pytest.mark.parametrize("wrap", [lambda y: {"a": {"b": [y.log()]}}, lambda y: (y, None, y.log())])
def test_outputs_of_any_structure(gloo_world: World, wrap: Callable[[Tensor], Any]) -> None:
    def last(outputs: Any) -> Tensor:
        return outputs["a"]["b"][0] if isinstance(outputs, dict) else outputs[2]

    model = nn.Sequential(Net(), Lambda(wrap))
    found = _diagnose(model, [ONES, 0 * ONES], gloo_world, loss=Sum(last))
    assert found == _found(Stage.FORWARD, "1", "0.head.weight", "0.body.0.weight")


def test_the_models_own_forward_has_no_name(gloo_world: World) -> None:
    class Own(Net):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x).log()

    (found,) = _diagnose(Own(), [ONES, 0 * ONES], gloo_world)
    assert (found.stage, found.module) == (Stage.FORWARD, "")
    assert "that of the model itself" in explain([found])


def test_a_loss(gloo_world: World) -> None:
    """The gradient of a logarithm is finite even where the logarithm is not."""
    batches = [ONES, -ONES, ONES]
    assert _diagnose(Net(), batches, gloo_world, loss=Sum(torch.log)) == _found(Stage.LOSS, "")
    assert _diagnose(Net(), batches, gloo_world, loss=Sum(torch.sqrt)) == _found(Stage.LOSS, "", *BOTH)


def test_a_backward(gloo_world: World) -> None:
    """Forward and loss are finite; below the square root the gradient is infinite, times 0 NaN."""
    net = Net(Lambda(torch.sqrt))
    found = _diagnose(net, [ONES, 0 * ONES], gloo_world)
    assert found == _found(Stage.BACKWARD, "body.0", "body.0.weight")
    assert _diagnose(nn.Sequential(net), [ONES, ONES], gloo_world) == ()


def test_a_loss_scale_that_is_too_large(gloo_world: World) -> None:
    """What overflowed in fp16 overflows again: the loss is scaled as in training."""
    engine = _engine(Net(), gloo_world, precision=_fp16(2.0**20))
    assert diagnose(engine, _window([ONES]), Sum(), gloo_world) == _found(Stage.BACKWARD, "head", *BOTH, micro_batch=0)
    engine = _engine(Net(), gloo_world, precision=_fp16(2.0**10))
    assert diagnose(engine, _window([ONES]), Sum(), gloo_world) == ()


def test_an_overflow_of_the_sum_over_micro_batches(gloo_world: World) -> None:
    """Each gradient is 0.6 of the largest number, one alone finite."""
    largest = torch.finfo(torch.float32).max

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return self.factor * x

    batches = [torch.tensor([[0.6 * largest]])] * 3
    window = replace(_window(batches), counts={"loss": 1.0})
    found = diagnose(_engine(Scaled(), gloo_world), window, Sum(lambda y: y.flatten()), gloo_world)
    assert found == _found(Stage.BACKWARD, "", "factor")


def test_masks_are_not_to_blame(gloo_world: World) -> None:
    """A mask of minus infinity, targets of NaN that stand for missing ones, and a weight that nothing uses."""

    class Masking(Net):
        def __init__(self) -> None:
            super().__init__()
            self.mask = Lambda(lambda batch: self.body(batch["x"]) + batch["mask"])
            self.never_used = nn.Linear(1, 1)

        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            return self.head(self.mask(batch).softmax(-1)).sqrt()

    class Loss(Sum):
        def __call__(self, model: nn.Module, batch: Any) -> Tensor:
            return (model(batch) * torch.nan_to_num(batch["target"])).sum()

    model = Masking()
    engine = _engine(model, gloo_world, find_unused_parameters=True)
    with torch.no_grad():
        model.never_used.weight.fill_(torch.nan)
    common = {"x": ONES, "target": torch.tensor([[1.0], [torch.nan]])}
    masks = torch.tensor([[0.0, -torch.inf]]), torch.tensor([[-torch.inf, -torch.inf]])
    batches = [common | {"mask": mask} for mask in (masks[0], masks[0], masks[1])]
    clean = diagnose(engine, _window(batches[:2]), Loss(), gloo_world)
    assert clean == ()
    (found,) = diagnose(engine, _window(batches), Loss(), gloo_world)
    assert (found.micro_batch, found.stage, found.module) == (2, Stage.FORWARD, "head")
    # With nothing to compare it with, the first output is named; the mask in the input is still none of the data's.
    with torch.no_grad():
        model.never_used.weight.zero_()
    (found,) = diagnose(engine, _window([batches[2] | {"target": ONES}]), Loss(), gloo_world)
    assert (found.stage, found.module) == (Stage.FORWARD, "mask")


class Everything(nn.Module):
    """Draws from every generator and changes buffers, in place and anew."""

    anew: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
        self.frozen = nn.BatchNorm1d(1).eval().requires_grad_(False)
        self.register_buffer("anew", torch.zeros(1))
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        self.anew = self.anew + random.random() + np.random.rand()  # noqa: NPY002, S311
        if self.fails:
            raise RuntimeError("a forward that fails")
        return self.frozen(self.layers(x))


def _state(model: nn.Module) -> Iterator[Any]:
    yield from (tensor.clone() for tensor in (*model.parameters(), *model.buffers()))
    yield torch.get_rng_state()
    yield torch.tensor(random.getstate()[1])
    yield torch.from_numpy(np.random.get_state()[1].astype(np.int64))  # type: ignore[index,union-attr]  # noqa: NPY002
    yield torch.tensor([module.training for module in model.modules()])
    yield torch.tensor([len(module._forward_hooks) for module in model.modules()])
    yield torch.tensor([len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()])


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("find_unused", [False, True])
@pytest.mark.filterwarnings("ignore::distaccum.errors.BatchStatisticsWarning")
def test_everything_is_left_as_it_was(gloo_world: World, fails: bool, find_unused: bool) -> None:
    model = Everything()
    engine = _engine(model, gloo_world, find_unused_parameters=find_unused)
    x = torch.randn(4, 2)
    window = _window([x, torch.full((4, 2), torch.nan), x])
    addresses = [p.grad.data_ptr() for p in model.parameters() if p.grad is not None]
    buffers = [id(buffer) for buffer in model.buffers()]
    before = list(_state(model))
    model.fails = fails
    if fails:
        with pytest.raises(RuntimeError, match="a forward that fails"):
            diagnose(engine, window, Sum(), gloo_world)
    else:
        (found,) = diagnose(engine, window, Sum(), gloo_world)
        assert (found.micro_batch, found.stage) == (1, Stage.INPUT)
    for was, now in zip(before, _state(model), strict=True):
        assert torch.equal(was, now)
    assert [id(buffer) for buffer in model.buffers()] == buffers
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert [gradient.data_ptr() for gradient in gradients] == addresses
    assert not any(gradient.any() for gradient in gradients)


def test_training_goes_on_as_without_it(gloo_world: World) -> None:
    weights = []
    for looks in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        engine = _engine(model, gloo_world)
        for _ in range(3):
            window = _window([torch.randn(2, 2), torch.randn(2, 2)])
            run_window(engine, window, Sum())
            if looks:
                assert diagnose(engine, window, Sum(), gloo_world) == ()
        weights.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_inside_an_activation_checkpoint(gloo_world: World, reentrant: bool) -> None:
    """Its second forward, in the backward, is not taken for the first."""

    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Any:
            return self.head(checkpoint(self.body, x.requires_grad_(), use_reentrant=reentrant))

    # In place, which full backward hooks would not bear.
    model = Checkpointed(nn.Sequential(Lambda(lambda x: x.clone().log_()), nn.ReLU(inplace=True)))
    (found,) = _diagnose(model, [ONES, -ONES], gloo_world)
    assert (found.micro_batch, found.stage, found.module) == (1, Stage.FORWARD, "body.1.0")


def test_a_compiled_model_is_looked_into(gloo_world: World) -> None:
    """Compiled code calls no hooks that were added after it."""
    model = Net(Lambda(torch.log))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, while it compiles
        engine = _engine(torch.compile(model, backend="eager"), gloo_world)  # type: ignore[arg-type]
        run_window(engine, _window([ONES]), Sum())
        found = diagnose(engine, _window([ONES, -ONES]), Sum(), gloo_world)
    assert found == _found(Stage.FORWARD, "body.1", "head.weight")


def test_a_window_that_is_clean_or_empty(gloo_world: World) -> None:
    assert _diagnose(Net(), [ONES, ONES], gloo_world) == ()
    assert _diagnose(Net(), [], gloo_world) == ()
    assert "no single micro-batch" in explain(())


def test_nothing_need_be_known_of_samples_and_counts(gloo_world: World) -> None:
    window = replace(_window([ONES, torch.nan * ONES]), ids=tuple, counts={})
    (found,) = diagnose(_engine(Net(), gloo_world), window, Sum(), gloo_world)
    assert (found.samples, found.micro_batch) == ((), 1)
    assert "samples" not in explain([found])


def test_a_message_names_a_few() -> None:
    finding = NonFinite(
        rank=3,
        micro_batch=2,
        samples=tuple(range(6)),
        stage=Stage.BACKWARD,
        module="blocks.1.fc",
        parameters=tuple("abcdefg"),
    )
    assert explain([finding]) == (
        "It began on rank 3 in micro-batch 2 (samples 0, 1, 2, 3 and 2 more): the loss is finite, the gradient is not "
        "from blocks.1.fc on; not finite are the gradients of a, b, c, d and 3 more"
    )
    several = explain([replace(finding, rank=rank) for rank in range(9)])
    assert several.count("micro-batch 2") == 4
    assert several.endswith("; and on 5 more ranks")
    assert "\n" not in several
