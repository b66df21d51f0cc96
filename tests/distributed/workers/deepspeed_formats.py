"""Run by torchrun: one window on each of DeepSpeed's stages, where a gradient could be rounded to 16 bits on its way.

``deepspeed_formats.py RESULT`` writes as JSON, by stage, the error of the update: behind a frozen parameter in bf16
that the optimizer was given too, relative to fp64 in one process; and of a bf16 run, relative to what stage 0 does.
"""

from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from distaccum import World
from distaccum.config.engine import DeepSpeedConfig
from distaccum.engines.state import whole_state
from tests.support.accumulators import over_sgd
from tests.support.answers import give

SAMPLES, MICRO = 24, 2


class Model(nn.Module):
    """A frozen layer, and two that train."""

    def __init__(self, frozen: torch.dtype) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8, bias=False).to(frozen).requires_grad_(False)
        self.wide, self.last = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.base(x.to(self.base.weight.dtype)).to(self.wide.weight.dtype)
        return self.last(torch.tanh(self.wide(found))).to(torch.promote_types(self.last.weight.dtype, torch.float32))


def update(model: nn.Module, data: Tensor, stage: int, precision: str, world: World) -> dict[str, Tensor]:
    """What a window of SGD has added to the weights."""
    model = deepcopy(model)
    acc = over_sgd(model, 1.0, (SAMPLES, MICRO), engine=DeepSpeedConfig(stage=stage), precision=precision, world=world)
    before = whole_state(acc.engine, world).model
    for window in acc.windows(DataLoader(data, batch_size=MICRO)):  # type: ignore[arg-type]
        for micro in window:
            with acc.accumulate():
                acc.backward(acc.model(micro.batch).square().sum(), len(micro.batch), reduction="sum")
    after = whole_state(acc.engine, world).model
    acc.close()
    return {name: (after[name].double() - before[name].double()) for name in after if not name.startswith("base")}


def error(found: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    """In the 2-norm over all weights."""
    wrong = torch.cat([(found[name] - truth[name]).flatten() for name in truth])
    return float(wrong.norm() / torch.cat([value.flatten() for value in truth.values()]).norm())


def main(world: World) -> dict[str, list[float]]:
    torch.manual_seed(0)
    model, data = Model(torch.bfloat16), torch.randn(SAMPLES, 8)
    hidden = model.base(data.bfloat16()).double()
    trained = deepcopy(model).double()
    trained.last(torch.tanh(trained.wide(hidden))).square().sum().div(SAMPLES).backward()
    truth = {name: -p.grad for name, p in trained.named_parameters() if p.grad is not None}
    plain = Model(torch.float32)
    in_bf16 = [update(plain, data, stage, "bf16", world) for stage in range(4)]
    return {
        "frozen": [error(update(model, data, stage, "fp32", world), truth) for stage in range(4)],
        "bf16": [error(one, in_bf16[0]) for one in in_bf16],
    }


if __name__ == "__main__":
    give(main)
