"""Run by torchrun: rollouts that arrive, of other numbers and sizes on each rank, beside one process in fp64.

Each is trained on twice; the last rank has none of the first, no rank any of the third that counts. Noise is measured.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from distaccum import Accumulator, DeepSpeedConfig, World
from distaccum.errors import MisuseError
from distaccum.tools.noise import GradientNoise
from tests.support.answers import asked, give

Batch = dict[str, Tensor]
ROLLOUTS, PASSES, EMPTY, DECAY = 5, 2, 2, 0.8
NOISE = ("noise_scale_trace", "noise_scale_grad_sq")


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


def reference(ranks: int) -> tuple[list[Tensor], list[Tensor], list[float]]:
    """The weights before and after, by plain fp64 on all that arrived anywhere; the noise of all but the last rollout.

    That is tr(S) and |G|^2, of the two equations that micro-batches and windows make.
    """
    model = made().double()
    before, weights = copy.deepcopy([p.detach() for p in model.parameters()]), list(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sums = torch.zeros(2, 3, dtype=torch.float64)
    for number in range(ROLLOUTS):
        batches = [batch for rank in range(ranks) for batch in rollout(number, rank, ranks)]
        counted = sum(map(count, batches))
        for _ in range(PASSES if counted else 0):
            losses = [loss(model, batch | {"x": batch["x"].double()}) / counted for batch in batches]
            each = [torch.autograd.grad(one, weights) for one in losses]
            for p, *parts in zip(weights, *each, strict=True):
                p.grad = torch.stack(parts).sum(0)
            squares = [
                sum(float(part.square().sum()) for part in parts) for parts in [*each, [p.grad for p in weights]]
            ]
            shares = [count(batch) / counted for batch in batches] + [1.0]
            rows = [[square, s / counted, s * s] for square, s in zip(squares, shares, strict=True)]
            *blocks, window = torch.tensor(rows, dtype=torch.float64)
            parts = 0.0 * window if (ranks, len(batches)) == (1, 1) else torch.stack(blocks).sum(0)
            if number < ROLLOUTS - 1:
                sums = DECAY * sums + torch.stack([parts, window])
            optimizer.step()
    return before, [p.detach() for p in weights], torch.linalg.solve(sums[:, 1:], sums[:, 0]).tolist()


def trained(world: World, engine: str, *, whole: bool = False, resumed: bool = False) -> dict[str, Any]:
    config = DeepSpeedConfig(stage=3) if engine == "deepspeed 3" else engine
    model = made()
    usual = len if whole else count  # len: not what these windows count, which says so itself
    acc = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.05), count=usual, engine=config, world=world)
    noise = GradientNoise(acc, decay=DECAY)
    acc.engine.hooks.add(noise)
    saved = None
    for number in range(ROLLOUTS):
        if resumed and number == ROLLOUTS - 1:
            saved = acc.state_dict()
            acc.close()
            model = made()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            acc = Accumulator(model, optimizer, count=usual, engine=config, world=world)
            acc.load_state_dict(saved)
        for _ in range(PASSES):
            window = acc.window(iter(rollout(number, world.rank, world.size)), count=count if whole else None)
            if whole and window != ():
                acc.step(window, loss)
                continue
            for micro in window:
                with acc.accumulate():
                    acc.backward(loss(acc.model, micro.batch))
    state = acc.state_dict()
    acc.close()
    before, after, true = reference(world.size)
    wrong = torch.cat([(own - true).flatten() for own, true in zip(state["model"].values(), after, strict=True)])
    moved = torch.cat([(one - other).flatten() for one, other in zip(before, after, strict=True)])
    progress = state["progress"]
    found = {"off": float(wrong.norm() / moved.norm()), "steps": progress["step"], "windows": progress["window"]}
    return found | {
        "noise": [] if resumed else [noise.metrics[key] / one for key, one in zip(NOISE, true, strict=True)]
    }


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
    model = made()
    acc = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.05), world=world)
    try:
        acc.window([], count=count)
    except MisuseError as error:
        said.append(str(error))
    acc.close()
    return said


def main(world: World) -> dict[str, Any]:
    ways = {"loop": {}, "step": {"whole": True}, "resumed": {"resumed": True}}
    trainings = [
        trained(world, engine, **options) | {"of": f"{engine}, {way}"}
        for engine in asked()
        for way, options in ways.items()
    ]
    return {"trainings": trainings, "said": world.all_gather_object(failing(world)), "refused": refused(world)}


if __name__ == "__main__":
    give(main)
