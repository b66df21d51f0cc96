"""Run by torchrun: rollouts that arrive, of other numbers and sizes on each rank, beside one process in fp64.

Each is trained on twice; the last rank has none of the first, no rank any of the third that counts.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from distaccum import Accumulator, DeepSpeedConfig, World
from distaccum.errors import MisuseError
from tests.support.answers import give

Batch = dict[str, Tensor]
ROLLOUTS, PASSES, EMPTY = 5, 2, 2


def rollout(number: int, rank: int, ranks: int) -> list[Batch]:
    """Sequences, and a mask of the tokens that count."""
    generator = torch.Generator().manual_seed(100 * number + rank)

    def whole(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    found = []
    for _ in range(0 if (number, rank) == (0, ranks - 1) else whole(1, 5)):
        shape = whole(1, 4), whole(2, 7)
        mask = (torch.rand(shape, generator=generator) < (0.0 if number == EMPTY else 0.7)).float()
        found.append({"x": torch.randn(*shape, 6, generator=generator), "mask": mask})
    return found


def loss(model: Any, batch: Batch) -> Tensor:
    total: Tensor = (model(batch["x"]).squeeze(-1).square() * batch["mask"].to(batch["x"].dtype)).sum()
    return total


def count(batch: Batch) -> int:
    return int(batch["mask"].sum())


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))


def reference(ranks: int) -> tuple[list[Tensor], list[Tensor]]:
    """The weights before and after, by plain fp64 on all that arrived anywhere."""
    model = made().double()
    before = copy.deepcopy([p.detach() for p in model.parameters()])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for number in range(ROLLOUTS):
        batches = [batch for rank in range(ranks) for batch in rollout(number, rank, ranks)]
        counted = sum(map(count, batches))
        for _ in range(PASSES if counted else 0):
            optimizer.zero_grad()
            for batch in batches:
                (loss(model, batch | {"x": batch["x"].double()}) / counted).backward()
            optimizer.step()
    return before, [p.detach() for p in model.parameters()]


def trained(world: World, engine: str, *, whole: bool = False, resumed: bool = False) -> dict[str, Any]:
    config = DeepSpeedConfig(stage=3) if engine == "deepspeed 3" else engine
    model = made()
    acc = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.05), count=count, engine=config, world=world)
    saved = None
    for number in range(ROLLOUTS):
        if resumed and number == ROLLOUTS - 1:
            saved = acc.state_dict()
            acc.close()
            model = made()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            acc = Accumulator(model, optimizer, count=count, engine=config, world=world)
            acc.load_state_dict(saved)
        for _ in range(PASSES):
            window = acc.window(iter(rollout(number, world.rank, world.size)))
            if whole and window != ():
                acc.step(window, loss)
                continue
            for micro in window:
                with acc.accumulate():
                    acc.backward(loss(acc.model, micro.batch))
    state = acc.state_dict()
    acc.close()
    before, after = reference(world.size)
    wrong = torch.cat([(own - true).flatten() for own, true in zip(state["model"].values(), after, strict=True)])
    moved = torch.cat([(one - other).flatten() for one, other in zip(before, after, strict=True)])
    progress = state["progress"]
    return {"off": float(wrong.norm() / moved.norm()), "steps": progress["step"], "windows": progress["window"]}


def failing(world: World) -> str:
    """What each rank is told where one fails while its part of a window is made."""
    model = made()
    acc = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.05), count=count, world=world)

    def broken() -> Any:
        yield from rollout(1, 0, 1)
        if world.rank == 0:
            raise OSError("the sampler of rank 0 is gone")

    try:
        acc.window(broken())
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    acc.close(alone=True)
    return said


def refused(world: World) -> list[str]:
    """What one batch in place of several is told, and what comes after a stop."""
    model, said = made(), []
    acc = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.05), count=count, world=world)
    for given in (rollout(1, 0, 1)[0], torch.ones(2, 3), []):
        if isinstance(given, list):
            acc.stop()
            acc.window(rollout(1, world.rank, world.size))
            acc.abandon()
        try:
            acc.window(given)
        except MisuseError as error:
            said.append(str(error))
    acc.close()
    return said


if __name__ == "__main__":
    world = World.join()
    ways = {"loop": {}, "step": {"whole": True}, "resumed": {"resumed": True}}
    trainings = [
        trained(world, engine, **options) | {"of": f"{engine}, {way}"}
        for engine in json.loads(Path(sys.argv[2]).read_text())
        for way, options in ways.items()
    ]
    give({"trainings": trainings, "said": world.all_gather_object(failing(world)), "refused": refused(world)}, world)
