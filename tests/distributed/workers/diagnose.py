"""Run by torchrun on 2 ranks: windows with a NaN in a sample of rank 1. Writes what each rank says of them."""

from dataclasses import asdict
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from distaccum import World
from distaccum.accumulation.step import run_window
from distaccum.data.window import MicroBatch, Window
from distaccum.engines.factory import create_engine
from distaccum.tools.diagnose import diagnose
from tests.support.accumulators import Loss
from tests.support.answers import give

# By case: the sample numbers of each rank's micro-batches.
SHARES: dict[str, tuple[list[list[int]], list[list[int]]]] = {
    "fewer": ([[0, 1]], [[2, 3], [4, 5], [6]]),
    "none": ([], [[2, 3], [4, 5], [6]]),
    "clean": ([[0, 1], [7]], [[2, 3]]),
}
SPOILED = 5


def sample(number: int) -> Tensor:
    """Three features, one of them NaN in the spoiled sample."""
    features = torch.randn(3, generator=torch.Generator().manual_seed(number))
    return features.index_fill(0, torch.tensor([1]), torch.nan) if number == SPOILED else features


def window(case: str, rank: int) -> Window:
    share, count = SHARES[case][rank], sum(len(ids) for ids in chain(*SHARES[case]))
    return Window(
        epoch=0,
        samples=count,
        counts={"loss": count},
        data_wait_s=0.0,
        ids=lambda: share,
        micro_batches=[MicroBatch(torch.stack([*map(sample, ids)]), {"loss": len(ids)}) for ids in share],
    )


def main(world: World) -> dict[str, Any]:
    """By case: whether the step was finite, and the findings of each rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    engine = create_engine(model, torch.optim.SGD(model.parameters(), lr=0.0), world)
    results = {}
    for case in SHARES:
        outcome = run_window(engine, window(case, world.rank), Loss())
        found = diagnose(engine, window(case, world.rank), Loss(), world)
        plain = [asdict(finding) | {"stage": finding.stage.value} for finding in found]
        results[case] = {"finite": outcome.finite, "ranks": world.all_gather_object(plain)}
    return results


if __name__ == "__main__":
    give(main)
