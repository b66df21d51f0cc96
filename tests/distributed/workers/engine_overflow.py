"""Run by torchrun: the same overflows on every engine, and what became of each window.

``engine_overflow.py RESULT ENGINE...``: a JSON file to write, and names in ``tests.support.engine_matrix.ENGINES``; or
a JSON file of cases, whose errors on ddp are written.

The loss is linear in the weights, with small whole numbers and powers of two, so that fp16 has every digit of the
gradient: the reference knows gradients without a model.
"""

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from distaccum import Accumulator, DataSpec, World
from distaccum.config.precision import PrecisionConfig, ScalerConfig
from tests.distributed.workers.engine_matrix import allow_fp16, weights_of
from tests.support.answers import asked, give
from tests.support.engine_matrix import ENGINES

RANKS, MICRO_SIZE, MICRO_STEPS, FEATURES, ROWS = 2, 2, 2, 4, 4  # all powers of two
GLOBAL_SIZE = RANKS * MICRO_SIZE * MICRO_STEPS
LR, MOMENTUM, CLIP_NORM, GROWTH_INTERVAL, MIN_SCALE, MAX_SCALE, POWER = 0.25, 0.5, 1.5, 3, 1.0, 2.0**6, 3
BAD_SAMPLE = GLOBAL_SIZE - MICRO_SIZE - 1  # on the last rank, before the boundary
MARK = 256
# "." a good window, "x" one with a gradient that cannot be held at any scale. At last the scale meets its floor.
WINDOWS = ".x....xx.....x.x." + 8 * "x" + ".."


@dataclass(frozen=True, kw_only=True)
class Case:
    """What trains: in fp32 the bad gradient is NaN, and there is no scale."""

    precision: str
    hysteresis: int
    fused: bool


CASES = (
    Case(precision="fp16", hysteresis=1, fused=True),
    Case(precision="fp16", hysteresis=2, fused=False),
    Case(precision="fp32", hysteresis=1, fused=True),
)


def sample(window: int, place: int) -> Tensor:
    """Whole numbers from -3 to 3; in a bad window one sample of one rank is marked by large ones."""
    generator = torch.Generator().manual_seed(100 * window + place)
    features = torch.randint(-3, 4, (FEATURES,), generator=generator).float()
    return features + MARK if WINDOWS[window] == "x" and place == BAD_SAMPLE else features


class Rows(nn.Module):
    """Two linear maps side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(FEATURES, ROWS, bias=False) for _ in range(2))
        for block in self.blocks:
            nn.init.zeros_(block.weight)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([block(x) for block in self.blocks], dim=1)


class Sum:
    """Of a model's outputs. In a bad window the gradient of the last one's weights alone, a single row, is spoiled."""

    def __init__(self, spoil: float) -> None:
        self._spoil = spoil

    def count(self, batch: Tensor) -> int:
        return len(batch)

    def __call__(self, model: nn.Module, batch: Tensor) -> Tensor:
        outputs = model(batch).float()
        factors = torch.ones_like(outputs)
        factors[:, -1] = torch.where(batch.amax() > MARK / 2, self._spoil, 1.0)
        return (outputs * factors).sum()


def rate(step: int) -> float:
    return 0.5 ** (step / 8)


def expected(case: Case) -> list[dict[str, Any]]:
    """By window: whether it is applied, at which scale, the updates so far, and a row of the weights after it."""
    weight, velocity = torch.zeros(FEATURES, dtype=torch.float64), torch.zeros(FEATURES, dtype=torch.float64)
    scale = 2.0**POWER if case.precision == "fp16" else 1.0
    row, left, step, found = -1, case.hysteresis, 0, []
    for window, kind in enumerate(WINDOWS):
        used = scale
        if kind == "x":
            row = -1
            if case.precision == "fp16":
                scale, left = (max(scale / 2, MIN_SCALE), left) if left == 1 else (scale, left - 1)
        else:
            mean = torch.stack([sample(window, place) for place in range(GLOBAL_SIZE)]).double().mean(0)
            norm = mean.norm().item() * (2 * ROWS) ** 0.5  # every row has this gradient
            velocity = MOMENTUM * velocity + mean * min(1.0, CLIP_NORM / (norm + 1e-6))
            weight = weight - LR * rate(step) * velocity
            step, row = step + 1, row + 1
            if row == GROWTH_INTERVAL and case.precision == "fp16":
                scale, row, left = min(scale * 2, MAX_SCALE), 0, case.hysteresis
        found.append({"applied": kind == ".", "scale": used, "step": step, "row": weight.tolist()})
    return found


def trained(engine: str, case: Case, world: World) -> dict[str, Any]:
    """The same of the real thing, at level 2."""
    model = Rows()
    samples: Any = [sample(window, place) for window in range(len(WINDOWS)) for place in range(GLOBAL_SIZE)]
    scaler = ScalerConfig(
        initial_scale_power=POWER,
        growth_interval=GROWTH_INTERVAL,
        min_scale=MIN_SCALE,
        max_scale=MAX_SCALE,
        hysteresis=case.hysteresis,
    )
    loss = Sum(2.0**30 if case.precision == "fp16" else float("nan"))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, fused=case.fused)
    acc = Accumulator(
        model,
        optimizer,
        global_batch_size=GLOBAL_SIZE,
        micro_batch_size=MICRO_SIZE,
        count=loss.count,
        schedule=rate,
        world=world,
        clip_norm=CLIP_NORM,
        nonfinite="skip",
        max_skips=100,
        engine=ENGINES[engine],
        precision=PrecisionConfig(name=case.precision, scaler=scaler),
    )
    seen, touched, rows_differ = [], [], 0.0
    before = weights_of(acc.engine, world)
    for number, window in enumerate(
        acc.windows(DataSpec(train=samples, eval_dataset=None, description="", shuffle=False))
    ):
        acc.step(window, loss)
        assert acc.last is not None
        after = weights_of(acc.engine, world)
        if not acc.last.applied and not all(torch.equal(before[name], after[name]) for name in after):
            touched.append(number)
        rows = torch.cat(list(after.values()))
        rows_differ = max(rows_differ, float((rows - rows[0]).abs().max()))
        found = {"applied": acc.last.applied, "scale": acc.last.loss_scale, "step": acc.progress.step}
        seen.append(found | {"row": rows[0].tolist()})
        before = after
    return {"windows": seen, "touched by a skip": touched, "rows differ by": rows_differ}


def errors(cases: list[Case], world: World) -> list[float]:
    """On ddp, of every window: of the weights, relative; of the scale; and of what is counted. The ranks' largest."""
    found = [0.0]
    for case in cases:
        own = trained("ddp", case, world)
        found += [own["rows differ by"], float(len(own["touched by a skip"]))]
        for seen, true in zip(own["windows"], expected(case), strict=True):
            row, true_row = (torch.tensor(one["row"], dtype=torch.float64) for one in (seen, true))
            found += [float((row - true_row).norm() / true_row.norm()), abs(seen["scale"] / true["scale"] - 1)]
            found += [float(abs(seen["step"] - true["step"])), float(seen["applied"] != true["applied"])]
    worst = torch.tensor(found, dtype=torch.float64).nan_to_num(torch.inf)
    torch.distributed.all_reduce(worst, op=torch.distributed.ReduceOp.MAX)
    return worst.tolist()


def main(world: World) -> Any:
    assert world.size == RANKS
    if sys.argv[2].endswith(".json"):
        return errors([Case(**one) for one in asked()], world)
    found = {engine: [trained(engine, case, world) for case in CASES] for engine in sys.argv[2:]}
    return world.all_gather_object(found)


if __name__ == "__main__":
    if any(engine.startswith("deepspeed") for engine in sys.argv[2:]):
        allow_fp16()
    give(main)
