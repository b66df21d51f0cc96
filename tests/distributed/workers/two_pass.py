"""Run by torchrun: losses that compare the samples of a window, on one engine after the other.

``two_pass.py RESULT CELLS``: a JSON file to write, and one with the cells. Of each is written the largest error of a
window's gradient or loss beside fp64 on whole batches, infinite where it is refused; and to ``RESULT.details`` what it
has found: the windows' mean losses, and the weights after an epoch.
"""

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim import SGD

from distaccum import Accumulator, World
from distaccum.config.engine import DeepSpeedConfig, EngineConfig, FSDP2Config, engine_config
from distaccum.config.precision import PrecisionConfig, ScalerConfig
from distaccum.errors import DistaccumError
from tests.distributed.workers.engine_matrix import weights_of
from tests.support import compared
from tests.support.answers import asked, give


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run: an epoch of ``size`` samples."""

    engine: str
    loss: str = "contrast"
    dtype: str = "float64"
    precision: str = "fp32"
    size: int = 29
    global_size: int = 12
    micro_size: int = 5
    dropout: float = 0.0
    plain: bool = False
    lr: float = 0.1
    verify: str = "first"


def _engine(name: str, loss: str) -> EngineConfig:
    kind, _, stage = name.partition(" ")
    if kind == "deepspeed":
        return DeepSpeedConfig(stage=int(stage))
    if kind == "fsdp2":  # in blocks, which are gathered in each forward
        blocks = ["router", "experts"] if loss == "balanced" else ["image", "text"]
        return FSDP2Config(sync=stage or "boundary", blocks=blocks)
    return engine_config(kind)


def run(cell: Cell, world: World) -> dict[str, Any]:
    """The cell's results; a collective."""
    dtype, own = getattr(torch, cell.dtype), (compared.LOSSES | compared.RANDOM)[cell.loss]()
    model = compared.make_model(cell.loss, dtype, cell.dropout)
    acc = Accumulator(
        model,
        SGD(model.parameters(), lr=cell.lr),
        global_batch_size=cell.global_size,
        micro_batch_size=cell.micro_size,
        count=own.count,
        seed=compared.SEED,
        world=world,
        engine=_engine(cell.engine, cell.loss),
        precision=PrecisionConfig(name=cell.precision, scaler=ScalerConfig(initial_scale_power=10)),
        verify=cell.verify,
    )
    model.train()
    torch.manual_seed(world.rank)  # of the rank's own generators, which nothing may depend on
    whole, errors, losses = compared.windows(cell.size, cell.global_size), [], []
    before = weights_of(acc.engine, world)
    for window in acc.windows(compared.samples(cell.size, dtype)):
        acc.step(window, compared.ByMicroBatch(own) if cell.plain else own)
        assert acc.last is not None
        assert acc.last.applied
        after = weights_of(acc.engine, world)
        found = {name: (before[name].double() - after[name].double()) / cell.lr for name in before}
        batch = whole[len(errors)]
        gradient, loss = compared.gradient_at(cell.loss, before, batch)
        losses.append(acc.mean_loss())
        errors.append(max(compared.error_by_name(found, gradient), abs(losses[-1] - loss) / abs(loss)))
        before = after
    assert len(errors) == len(whole)
    worst = max(errors) if not (cell.dropout or cell.loss == "sampled") else 0.0  # the truth draws no numbers
    flat = torch.cat([before[name].flatten() for name in sorted(before)]).tolist()
    acc.close()
    return {"error": worst, "losses": losses, "weights": flat, "verified": acc.verified}


def main(world: World) -> list[float]:
    found = []
    for cell in asked():
        try:
            found.append(run(Cell(**cell), world))
        except DistaccumError as error:
            found.append({"error": math.inf, "refused": f"{type(error).__name__}: {error}"})
    if world.is_main:
        Path(f"{sys.argv[1]}.details").write_text(json.dumps(found))
    return [each["error"] for each in found]


if __name__ == "__main__":
    give(main, timeout_s=40)
