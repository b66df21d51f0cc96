"""Run by torchrun: an fp16 run with overflows against arithmetic by hand, and its largest error.

``scaling.py RESULT _``: a JSON file to write a list of errors to.

The loss is linear in the weights, with small whole numbers and powers of two, so that fp16 has every digit of the
gradient, whatever the weights and the scale: the reference knows the gradients without a model.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from distaccum import Accumulator, DataSpec, World
from distaccum.config.precision import PrecisionConfig, ScalerConfig
from tests.support.answers import give

RANKS, MICRO_SIZE, MICRO_STEPS, FEATURES = 2, 2, 4, 4
GLOBAL_SIZE = RANKS * MICRO_SIZE * MICRO_STEPS
LR, CLIP_NORM, GROWTH_INTERVAL, MIN_SCALE, MAX_SCALE, POWER = 0.25, 0.9, 3, 2.0**-6, 2.0**6, 3
BAD_SAMPLE = GLOBAL_SIZE - MICRO_SIZE - 1  # on the last rank, before the boundary
MARK = 256
# "." a good window, "x" one with a gradient that fp16 cannot hold at any scale. At last the scale meets its floor.
WINDOWS = ".x....xx......" + 20 * "x" + ".."


def sample(window: int, place: int) -> Tensor:
    """Whole numbers from -3 to 3; in a bad window one sample of one rank is marked by large ones."""
    generator = torch.Generator().manual_seed(100 * window + place)
    features = torch.randint(-3, 4, (FEATURES,), generator=generator).float()
    return features + MARK if WINDOWS[window] == "x" and place == BAD_SAMPLE else features


class Linear:
    """The sum of a linear model's outputs; in a bad window times a factor that makes the gradient infinite in fp16."""

    def count(self, batch: Tensor) -> int:
        return len(batch)

    def __call__(self, model: nn.Module, batch: Tensor) -> Tensor:
        factor = torch.where(batch.amax() > MARK / 2, 2.0**30, 1.0)
        return (model(batch).float() * factor).sum()


def rate(step: int) -> float:
    """Falls with every update."""
    return 0.5 ** (step / 4)


def expected() -> tuple[list[Tensor], list[float], list[int]]:
    """Weights, scale and step after each window: fp64, one process."""
    weight, scale, row, step = torch.zeros(FEATURES, dtype=torch.float64), 2.0**POWER, -1, 0
    found: tuple[list[Tensor], list[float], list[int]] = ([], [], [])
    for window, kind in enumerate(WINDOWS):
        if kind == "x":
            scale, row = max(scale / 2, MIN_SCALE), -1
        else:
            mean = torch.stack([sample(window, place) for place in range(GLOBAL_SIZE)]).double().mean(0)
            weight = weight - LR * rate(step) * mean * min(1.0, CLIP_NORM / (mean.norm().item() + 1e-6))
            step, row = step + 1, row + 1
            if row == GROWTH_INTERVAL:
                scale, row = min(scale * 2, MAX_SCALE), 0
        for values, value in zip(found, (weight, scale, step), strict=True):
            values.append(value)  # type: ignore[arg-type]
    return found


def trained(world: World) -> tuple[list[Tensor], list[float], list[int]]:
    """The same of the real thing, at level 2."""
    model = nn.Linear(FEATURES, 1, bias=False)
    nn.init.zeros_(model.weight)
    samples: Any = [sample(window, place) for window in range(len(WINDOWS)) for place in range(GLOBAL_SIZE)]
    scaler = ScalerConfig(
        initial_scale_power=POWER, growth_interval=GROWTH_INTERVAL, min_scale=MIN_SCALE, max_scale=MAX_SCALE
    )
    loss = Linear()
    acc = Accumulator(
        model,
        torch.optim.SGD(model.parameters(), lr=LR, fused=True),
        global_batch_size=GLOBAL_SIZE,
        micro_batch_size=MICRO_SIZE,
        count=loss.count,
        schedule=rate,
        clip_norm=CLIP_NORM,
        max_skips=100,
        world=world,
        precision=PrecisionConfig(name="fp16", scaler=scaler),
    )
    found: tuple[list[Tensor], list[float], list[int]] = ([], [], [])
    for window in acc.windows(DataSpec(train=samples, eval_dataset=None, description="linear", shuffle=False)):
        acc.step(window, loss)
        weight = model.weight.detach().double().flatten()
        for values, value in zip(found, (weight, acc.engine.state().scaler["scale"], acc.progress.step), strict=True):
            values.append(value)
    return found


def largest_error(world: World) -> float:
    """Over all windows: relative, of weights, scale and step."""
    errors = [0.0]
    for (weight, scale, step), (true_weight, true_scale, true_step) in zip(
        zip(*trained(world), strict=True), zip(*expected(), strict=True), strict=True
    ):
        errors.append(float((weight - true_weight).norm() / true_weight.norm()))
        errors += [abs(scale - true_scale) / true_scale, float(abs(step - true_step))]
    return max(error if math.isfinite(error) else math.inf for error in errors)


if __name__ == "__main__":
    joined = World.join()
    error = torch.tensor([largest_error(joined)], dtype=torch.float64)
    torch.distributed.all_reduce(error, op=torch.distributed.ReduceOp.MAX)  # every rank must have it right
    give(error.tolist(), joined)
