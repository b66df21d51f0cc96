"""The engine matrix: the same step on every engine, in every number format, beside one fp64 process on whole batches.

The truth shares nothing with distaccum but the order of the samples (``Shuffle``, tested on its own) and what a user
brings: model, data, the formula of the loss. Its optimizers are written out.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import combinations, product
from math import sqrt
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distaccum.config.engine import DDPConfig, DeepSpeedConfig, EngineConfig, FSDP2Config, Zero1Config
from distaccum.data.plan.shuffle import Shuffle
from tests.support import matrix
from tests.support.matrix import GLOBAL_SIZE, IGNORED, PADDING, SEED, VOCABULARY

WITH_DEEPSPEED = find_spec("deepspeed") is not None
ENGINES: dict[str, EngineConfig] = {
    "ddp": DDPConfig(),
    "zero1": Zero1Config(),
    "fsdp2 boundary": FSDP2Config(sync="boundary"),
    "fsdp2 every": FSDP2Config(sync="every"),
    **({f"deepspeed {stage}": DeepSpeedConfig(stage=stage) for stage in range(4)} if WITH_DEEPSPEED else {}),
}
# CI launches one of each kind; the others are heavy, in a launch of their own.
OF_EACH_KIND = tuple(name for name in ENGINES if name in ("ddp", "fsdp2 boundary", "deepspeed 2"))
WORLDS = (1, 2, 4)
# Some ranks have a micro-batch more than others in the last window: of 19 samples.
MICRO_SIZES = {1: 5, 2: 3, 4: 4}
PRECISIONS = ("fp32", "bf16", "fp16", "bf16-weights")
AXES: dict[str, tuple[str, ...]] = {
    "engine": tuple(ENGINES),
    "precision": PRECISIONS,
    "data": ("full", "ragged", "unequal"),
    "update": ("sgd", "adamw"),
}
# What a mode changes of an engine's settings.
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "blocks": {"activation_checkpoint": "blocks"},
    "selective": {"activation_checkpoint": "selective"},
    "ema": {},  # what is measured is the moving average
}
OF_MODES: dict[str, tuple[str, ...]] = {
    "mode": tuple(MODES)[1:],
    "engine": AXES["engine"],
    "data": AXES["data"],
    "update": AXES["update"],
}
UPDATES = 20
RATE, BETAS, DECAY = 0.05, (0.9, 0.999), 0.1
EMA_DECAY = 0.7
# Adam divides each element by its own size. With an epsilon below what rounding does to a gradient, an element that is
# 0 but for rounding moves as far as any other, and two right ways to add up differ by whole steps; and a gradient that
# is wrong by a factor moves nothing otherwise. So epsilon is as large as elements here are (0.02 in the mean square):
# a change of theirs is one of the step, rounding's as small and a broken normaliser's as large as it is.
EPSILON = 1e-2
# Of fp32 what was asked for; else multiples of the unit roundoff, of which an element takes part in some ten: a forward
# and a backward round weights, activations and their gradients. The largest errors measured are 2 and 3 of them.
TOLERANCES = {
    ("fp32", "sgd"): 1e-6,
    ("fp32", "adamw"): 1e-6,
    ("bf16", "sgd"): 4 * 2.0**-8,
    ("bf16", "adamw"): 4 * 2.0**-8,
    ("bf16-weights", "sgd"): 4 * 2.0**-8,
    ("bf16-weights", "adamw"): 4 * 2.0**-8,
    ("fp16", "sgd"): 4 * 2.0**-11,
    ("fp16", "adamw"): 4 * 2.0**-11,
}
Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Cell:
    """One point of the matrix."""

    engine: str
    world: int
    precision: str
    data: str
    update: str
    mode: str = "plain"

    @property
    def config(self) -> EngineConfig:
        return replace(ENGINES[self.engine], **MODES[self.mode])

    @property
    def tolerance(self) -> float:
        """The largest relative error, in the 2-norm over all weights."""
        # One update moves the average by less than the weights, and is rounded as theirs is.
        share = 1 - EMA_DECAY if (self.mode, self.update) == ("ema", "sgd") else 1.0
        return TOLERANCES[self.precision, self.update] / share


def every_cell() -> list[Cell]:
    points = [point for point in product(*AXES.values()) if not has_no_masters(*point)]
    return [Cell(world=world, **dict(zip(AXES, values, strict=True))) for world in WORLDS for values in points]


def cells_of_modes(world: int) -> list[Cell]:
    """Every mode on every engine, in fp32."""
    points = [point for point in product(*OF_MODES.values()) if not is_refused(*point)]
    return [Cell(world=world, precision="fp32", **dict(zip(OF_MODES, values, strict=True))) for values in points]


def is_refused(mode: str, engine: str, *_: str) -> bool:
    """Whether the engine refuses the mode by name."""
    return engine == "deepspeed 3" and mode in ("selective", "ema")


def has_no_masters(engine: str, precision: str, *_: str) -> bool:
    """Whether the engine refuses the precision by name."""
    return engine.startswith("deepspeed") and precision == "bf16-weights"


def covering_set(
    axes: Mapping[str, tuple[str, ...]] = AXES, left_out: Callable[..., bool] = has_no_masters, **fixed: str
) -> list[Cell]:
    """Few cells of two ranks in which every two values of every two axes meet: greedily, so always the same ones."""

    def pairs(point: tuple[str, ...]) -> set[Any]:
        return set(combinations(enumerate(point), 2))

    points = [point for point in product(*axes.values()) if not left_out(*point)]
    chosen = matrix.covering(points, pairs)
    return [Cell(world=2, **fixed, **dict(zip(axes, best, strict=True))) for best in chosen]


class Block(nn.Module):
    """What FSDP2 shards one by one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 3 * width), nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(torch.tanh(self.wide(self.norm(x))))


class Model(nn.Module):
    """Token logits ``(B, T, V)``, and one score a sample, ``(B,)``, which padding does not change."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.logits, self.score = nn.Linear(width, VOCABULARY), nn.Linear(width, 1)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.embed(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        real = (inputs != PADDING).unsqueeze(-1)
        return self.logits(hidden), self.score((hidden * real).sum(1) / real.sum(1)).squeeze(-1)


def make_model() -> Model:
    torch.manual_seed(1)
    model = Model()
    with torch.no_grad():
        model.embed.weight.mul_(0.25)  # what a weight loses is then not small beside the weight, whose digits end
    return model


def make_data(cell: Cell) -> list[dict[str, Tensor]]:
    return matrix.make_data(matrix.Cell(cell.world, 1, cell.data, 2, "two", "float32"))


def windows(samples: list[dict[str, Tensor]], epoch: int) -> list[dict[str, Tensor]]:
    """Those of one epoch, each one batch."""
    order = Shuffle(len(samples), seed=SEED, epoch=epoch)(np.arange(len(samples)))
    begins = range(0, len(samples), GLOBAL_SIZE)
    return [matrix.collate([samples[int(i)] for i in order[begin : begin + GLOBAL_SIZE]]) for begin in begins]


def gradient(weights: Weights, window: dict[str, Tensor], *, rounds: bool = False) -> dict[str, Tensor]:
    """Of the mean over the window's labels, and that over its samples: fp64, one process, the whole batch.

    ``rounds``: at the weights' roundings to bf16.
    """
    model = Model().double()
    model.load_state_dict({name: weight.bfloat16() if rounds else weight for name, weight in weights.items()})
    logits, score = model(window["inputs"])
    language = F.cross_entropy(logits.flatten(0, 1), window["labels"].flatten(), ignore_index=IGNORED)
    (language + 0.5 * (score - window["target"].double()).square().mean()).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def adamw(
    weights: Weights, samples: list[dict[str, Tensor]], *, rounds: bool = False, averages: bool = False
) -> dict[str, Tensor]:
    """The weights after :data:`UPDATES` of AdamW, as in I. Loshchilov and F. Hutter (2019), in fp64.

    ``rounds``: they are masters, and the gradient is that at their roundings to bf16. ``averages``: their average.
    """
    now = {name: weight.double() for name, weight in weights.items()}
    average = dict(now)
    first, second = ({name: torch.zeros_like(weight) for name, weight in now.items()} for _ in range(2))
    step, epoch = 0, 0
    while step < UPDATES:
        for window in windows(samples, epoch)[: UPDATES - step]:
            step += 1
            for name, g in gradient(now, window, rounds=rounds).items():
                first[name] = BETAS[0] * first[name] + (1 - BETAS[0]) * g
                second[name] = BETAS[1] * second[name] + (1 - BETAS[1]) * g * g
                size = second[name].sqrt() / sqrt(1 - BETAS[1] ** step) + EPSILON
                now[name] = now[name] * (1 - RATE * DECAY) - RATE * first[name] / (1 - BETAS[0] ** step) / size
            average = moved(average, now)
        epoch += 1
    return average if averages else now


def moved(average: Weights, weights: Weights) -> dict[str, Tensor]:
    """The moving average after an update that leaves ``weights``, in fp64."""
    return {
        name: EMA_DECAY * average[name].double() + (1 - EMA_DECAY) * weight.double() for name, weight in weights.items()
    }


def error(before: Weights, after: Weights, truth: Weights) -> float:
    """Of the change from ``before``, relative to the true one's 2-norm over all weights."""
    wrong = {name: after[name].double() - truth[name].double() for name in truth}
    change = {name: truth[name].double() - before[name].double() for name in truth}
    return _norm(wrong) / _norm(change)


def _norm(tensors: Weights) -> float:
    return float(torch.cat([tensor.flatten() for tensor in tensors.values()]).norm())


def in_groups(fixture: str) -> Any:
    """Parametrizes a test by ``engine``, and ``fixture`` by the names of the engines that one launch has."""
    import pytest  # noqa: PLC0415  ranks import this module, and need none

    others = tuple(name for name in ENGINES if name not in OF_EACH_KIND)
    groups = {OF_EACH_KIND: (), others: pytest.mark.heavy}
    cells = [pytest.param(group, name, marks=marks, id=name) for group, marks in groups.items() for name in group]
    return pytest.mark.parametrize((fixture, "engine"), cells, indirect=[fixture], scope="module")
