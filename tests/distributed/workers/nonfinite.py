"""Run by torchrun on 2 ranks, by engine: a loss or a gradient that is NaN on one rank, in each micro-step."""

import sys
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from distaccum import Accumulator, DataSpec, World
from distaccum.errors import NonFiniteError
from tests.distributed.workers.engine_matrix import weights_of
from tests.support.answers import give
from tests.support.engine_matrix import ENGINES

RANKS, MICRO_SIZE, MICRO_STEPS, FEATURES = 2, 2, 3, 4
SHARE = MICRO_SIZE * MICRO_STEPS
GLOBAL_SIZE = RANKS * SHARE
POLICIES = ("stop", "skip")
# Every two of a micro-step, a kind and a policy meet.
CASES = [
    (micro_step, kind, POLICIES[(micro_step + number) % 2])
    for micro_step, (number, kind) in product(range(MICRO_STEPS), enumerate(("loss", "gradient")))
]
MARK = 1000.0


def rank_of(micro_step: int) -> int:
    """The rank that is spoiled: each meets every kind and policy."""
    return micro_step % RANKS


def samples(windows: list[int], bad: int | None) -> list[Tensor]:
    """Those of the windows; number ``bad`` of window 1 is marked."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(3, GLOBAL_SIZE, FEATURES, generator=generator)
    if bad is not None:
        drawn[1, bad, 0] = MARK
    return [drawn[window, place] for window in windows for place in range(GLOBAL_SIZE)]


class Loss:
    """Half a sum of squares. Of a marked sample it is NaN, or is 0 more, whose gradient is NaN."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def count(self, batch: Tensor) -> int:
        return len(batch)

    def __call__(self, model: nn.Module, batch: Tensor) -> Tensor:
        outputs = model(batch)
        loss: Tensor = outputs.square().sum() / 2
        if bool((batch == MARK).any()):
            loss = loss * torch.nan if self._kind == "loss" else loss + (outputs.sum() * 0).abs().sqrt()
        return loss


def trained(engine: str, world: World, windows: list[int], **case: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, 4))
    acc = Accumulator(
        model,
        torch.optim.AdamW(model.parameters(), lr=0.01),
        global_batch_size=GLOBAL_SIZE,
        micro_batch_size=MICRO_SIZE,
        count=Loss("").count,
        world=world,
        clip_norm=1.0,
        nonfinite=case.get("policy", "stop"),
        max_skips=5,
        engine=ENGINES[engine],
        verify="never",
    )
    data = DataSpec(train=samples(windows, case.get("bad")), eval_dataset=None, description="", shuffle=False)
    found: dict[str, Any] = {"applied": [], "untouched": [], "message": ""}
    before = weights_of(acc.engine, world)
    try:
        for window in acc.windows(data):
            acc.step(window, Loss(case.get("kind", "")))
            assert acc.last is not None
            found["applied"].append(acc.last.applied)
            after = weights_of(acc.engine, world)
            found["untouched"].append(all(torch.equal(before[name], after[name]) for name in after))
            before = after
    except NonFiniteError as error:
        found["message"] = str(error)
    found["weights"] = torch.cat([weight.flatten() for weight in weights_of(acc.engine, world).values()]).tolist()
    acc.close()
    return found


def cells(engine: str, world: World) -> dict[str, Any]:
    """By case; and runs without the spoiled window, and of the first one alone."""
    found = {"without": trained(engine, world, [0, 2]), "first": trained(engine, world, [0])}
    for micro_step, kind, policy in CASES:
        bad = rank_of(micro_step) * SHARE + micro_step * MICRO_SIZE
        key = f"{micro_step}/{kind}/{policy}"
        found[key] = trained(engine, world, [0, 1, 2], kind=kind, policy=policy, bad=bad)
    return found


if __name__ == "__main__":
    give(lambda world: {engine: cells(engine, world) for engine in sys.argv[2:]}, of_all=True)
