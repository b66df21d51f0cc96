"""The truth of ``precision=fp8``: e4m3, its scales and bf16 are written out in fp64, and a window is one whole batch.

It shares nothing with torchao and with distaccum but the order of the samples; the cast to bf16 alone is torch's.
"""

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD

from distaccum import Accumulator, DataSpec, PrecisionConfig
from distaccum.config.engine import EngineConfig
from distaccum.distributed.world import World
from distaccum.engines.state import whole_state
from tests.support import engine_matrix, matrix

Weights = dict[str, Tensor]
RECIPES = ("rowwise", "rowwise_with_gw_hp")
KEPT = ["logits", "score"]
"""In fp32, so that fsdp2 gathers in fp32 too, and the truth is the same on each engine."""


def to_e4m3(x: Tensor) -> Tensor:
    """Three binary digits behind the first, of two that are as near the even one; below 2**-6 steps of 2**-9."""
    step = 2.0 ** (x.abs().log2().floor().clamp(min=-6.0) - 3)
    return ((x / step).round() * step).clamp(-448, 448)


def scaled(x: Tensor, dim: int | None, *, power: bool = True) -> Tensor:
    """e4m3 with a scale for each row along ``dim``, or one (None): its largest becomes 448, or the ``power`` below."""
    largest = (x.abs().max() if dim is None else x.abs().amax(dim, keepdim=True)).clamp(min=1e-12)
    scale = 448 / largest
    scale = 2.0 ** scale.log2().floor() if power else scale
    return to_e4m3(x * scale) / scale


def half(x: Tensor) -> Tensor:
    """To bf16, and back."""
    return x.bfloat16().double()


class Half(torch.autograd.Function):
    """What is bf16 in a forward, and its gradient in a backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return half(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return half(gradients[0])


class Tanh(torch.autograd.Function):
    """In bf16: the slope is that at the rounded output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = half(x.tanh())
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (out,) = ctx.saved_tensors
        return half(half(gradients[0]) * (1 - out * out))


class Product(torch.autograd.Function):
    """``x @ w.T`` by a recipe of torchao's, in fp64 between the roundings; ``bf16``: without those to e4m3."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, recipe: str) -> Tensor:
        x = half(x)
        ctx.save_for_backward(x, w)
        ctx.recipe = recipe
        if recipe == "tensorwise":
            return half(scaled(x, None, power=False) @ scaled(w, None, power=False).T)
        return half(scaled(x, -1) @ scaled(w, -1).T)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (x, w), g = ctx.saved_tensors, half(gradients[0])
        x, columns = x.flatten(0, -2), g.flatten(0, -2)
        if ctx.recipe == "rowwise":
            return half(scaled(g, -1) @ scaled(w, 0)), scaled(columns, 0).T @ scaled(x, 0), None
        if ctx.recipe == "rowwise_with_gw_hp":
            return half(scaled(g, -1) @ scaled(w, None)), columns.T @ x, None
        g, columns, x, w = (scaled(one, None, power=False) for one in (g, columns, x, w))
        return half(g @ w), columns.T @ x, None


class Linear(nn.Module):
    """The parameters of a layer, and the product by hand."""

    def __init__(self, linear: nn.Linear, recipe: str) -> None:
        super().__init__()
        self.weight, self.bias, self.recipe = linear.weight, linear.bias, recipe

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Product.apply(x, self.weight, self.recipe)  # type: ignore[no-untyped-call]
        if self.bias is not None:
            out = Half.apply(out + half(self.bias.detach()) + self.bias - self.bias.detach())
        return out


class Block(nn.Module):
    """As that of the engine matrix."""

    def __init__(self, block: engine_matrix.Block, recipe: str) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = block.norm, Linear(block.wide, recipe), Linear(block.narrow, recipe)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.narrow(Tanh.apply(self.wide(self.norm(x))))  # type: ignore[no-untyped-call]
        return x + hidden


torch.manual_seed(1)
MODEL = engine_matrix.Model(16)
SAMPLES = engine_matrix.make_data(engine_matrix.Cell("ddp", 2, "fp8", "unequal", "sgd"))
DATA = DataSpec(train=SAMPLES, eval_dataset=None, description="matrix", collate=matrix.collate)  # type: ignore[arg-type]


def truth(weights: Weights, window: dict[str, Tensor], recipe: str | None) -> Weights:
    """The gradient of a window in one forward; without a recipe nothing is rounded."""
    model = deepcopy(MODEL)
    model.load_state_dict(weights)
    model.double()
    if recipe is not None:
        model.blocks = nn.ModuleList(Block(block, recipe) for block in model.blocks)
    loss, count = matrix.Two()(model, window), matrix.Two().count(window)
    (loss["language"] / count["language"] + loss["value"] / count["value"]).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def accumulator(world: World, engine: EngineConfig, micro: int, precision: PrecisionConfig, **more: Any) -> Accumulator:
    model = deepcopy(MODEL)
    return Accumulator(
        model,
        SGD(model.parameters(), lr=1.0),
        global_batch_size=matrix.GLOBAL_SIZE,
        micro_batch_size=micro,
        count=matrix.Two().count,
        seed=matrix.SEED,
        world=world,
        engine=engine,
        precision=precision,
        **more,
    )


def weights_of(acc: Accumulator, world: World) -> Weights:
    return {name: one.clone() for name, one in whole_state(acc.engine, world).model.items()}


def off(found: Weights, expected: Weights) -> float:
    """Relative, in the 2-norm over all weights."""
    both = [torch.cat([one[name].flatten() for name in expected]) for one in (found, expected)]
    return float((both[0] - both[1]).norm() / both[1].norm())


def errors(world: World, engine: EngineConfig, micro: int, precision: PrecisionConfig) -> dict[str, float]:
    """The largest over an epoch's windows, of which the last is ragged, beside each truth: ``exact`` rounds nothing."""
    acc, found = accumulator(world, engine, micro, precision), dict[str, float]()
    before = weights_of(acc, world)
    for window, whole in zip(acc.windows(DATA), engine_matrix.windows(SAMPLES, epoch=0), strict=True):
        assert acc.step(window, matrix.Two()).applied
        after = weights_of(acc, world)
        gradient = {name: before[name].double() - after[name].double() for name in before}
        for name, recipe in {
            "exact": None,
            "tensorwise": "tensorwise",
            **dict(zip(RECIPES, RECIPES, strict=True)),
        }.items():
            found[name] = max(found.get(name, 0.0), off(gradient, truth(before, whole, recipe)))
        before = after
    return found
