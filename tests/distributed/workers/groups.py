"""Run by torchrun: parameter groups of the configuration on each engine, and from each engine's state on each.

``groups.py RESULT ENGINE...``. Everything is in fp64, but for DeepSpeed. The JSON of ``RESULT`` has, for a plain loop
of torch over whole batches with groups made by hand (``truth``), for each engine and for each pair of them, the final
weights as numbers; and whether an engine that goes on from its own state has the same bits.
"""

import sys
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distaccum import World
from distaccum.accumulation.accumulator import Accumulator
from distaccum.config.schema import RunConfig
from distaccum.data.factory import build_loader
from distaccum.data.spec import DataSpec
from distaccum.engines.state import whole_state
from distaccum.losses.cross_entropy import CrossEntropy
from distaccum.train.components import build_components
from distaccum.train.run import build_accumulator
from tests.support.answers import give

FEATURES, WIDTH, CLASSES, SAMPLES = 4, 6, 3, 7  # a window is all samples: an odd number for two ranks
LR, BEFORE, ALL = 0.01, 2, 5
ADAMW = {"_target_": "torch.optim.AdamW", "betas": [0.9, 0.95], "weight_decay": 0.1}
SGD = {"_target_": "torch.optim.SGD", "lr": 0.05, "momentum": 0.9}
GROUPS: list[dict[str, Any]] = [
    {"dims": [0, 1], "weight_decay": 0.0},
    {"match": "leave.*", "lr": 0.03, "betas": [0.5, 0.9]},
]
OTHER = {"match": "enter.*", "dims": 2, "optimizer": SGD}


def model() -> nn.Module:
    torch.manual_seed(1)
    layers = {"enter": nn.Linear(FEATURES, WIDTH), "norm": nn.LayerNorm(WIDTH), "body": nn.Linear(WIDTH, WIDTH)}
    return Net(nn.ModuleDict(layers | {"leave": nn.Linear(WIDTH, CLASSES)})).double()


class Net(nn.Module):
    """Its layers one after the other."""

    def __init__(self, layers: nn.ModuleDict) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = layer(x).tanh()
        return x


def samples() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(SAMPLES, FEATURES, generator=generator, dtype=torch.float64)
    return [(row, torch.tensor(i % CLASSES)) for i, row in enumerate(rows)]


def truth(several: bool) -> dict[str, Any]:
    """A plain loop over whole batches."""
    plain = model()
    named = dict(plain.named_parameters())
    thin = [p for name, p in named.items() if p.ndim < 2]
    enter, body, leave = (named[f"{layer}.weight"] for layer in ("enter", "body", "leave"))
    groups: Any = [
        {"params": [body] if several else [body, enter]},
        {"params": thin, "weight_decay": 0.0},
        {"params": [leave], "lr": 0.03, "betas": (0.5, 0.9)},
    ]
    optimizers: list[Any] = [torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), weight_decay=0.1, foreach=False)]
    if several:
        optimizers.append(torch.optim.SGD([enter], lr=0.05, momentum=0.9))
    schedules = [torch.optim.lr_scheduler.ExponentialLR(one, 0.9) for one in optimizers]
    inputs, labels = (torch.stack(part) for part in zip(*samples(), strict=True))
    for _ in range(ALL):
        plain.zero_grad()
        F.cross_entropy(plain(inputs), labels).backward()
        for one in (*optimizers, *schedules):
            one.step()
    return flat(plain.state_dict())


def flat(weights: Any) -> dict[str, Any]:
    return {name: value.flatten().tolist() for name, value in weights.items()}


def decay(*, total_steps: int) -> Callable[[int], float]:
    return lambda step: float(0.9**step)


def accumulator(engine: str, world: World, *, several: bool) -> tuple[Any, Accumulator]:
    config = RunConfig.from_dict(
        {
            "engine": engine,
            "batch": {"global_size": SAMPLES, "micro_size": 2},
            "optim": {
                "lr": LR,
                "clip_norm": None,
                "optimizer": ADAMW,
                "groups": [*([OTHER] if several else []), *GROUPS],
            },
            "schedule": {"_target_": f"{__name__}.decay"},
            "trainer": {"max_steps": ALL, "eval_every": 0, "verify": "never"},
            "checkpoint": {"every": 0},
        }
    )
    data, trained = DataSpec(train=samples()), model()
    if engine == "deepspeed":  # which steps in fp32, and refuses anything else
        data, trained = DataSpec(train=[(x.float(), y) for x, y in samples()]), trained.float()
    components = build_components(config, data, trained, CrossEntropy(), world_size=world.size, device=world.device)
    return build_loader(data, components.plan, world), build_accumulator(components, world)


def train(loader: Any, acc: Accumulator, windows: int) -> None:
    while acc.progress.window < windows:
        for window in acc.windows(loader):
            acc.step(window, CrossEntropy())
            if acc.progress.window >= windows:
                break


def main(world: World) -> dict[str, Any]:
    engines = sys.argv[2:]
    several = "deepspeed" not in engines
    found: dict[str, Any] = {"truth": truth(several)}
    digests: dict[str, Any] = {}
    states = {}
    for name in engines:
        loader, acc = accumulator(name, world, several=several)
        train(loader, acc, BEFORE)
        states[name] = deepcopy(acc.state_dict())
        train(loader, acc, ALL)
        whole = whole_state(acc.engine, world)
        found[name], digests[name] = flat(whole.model), whole
        acc.close()
    for before in engines:
        for after in engines:
            loader, acc = accumulator(after, world, several=several)
            acc.load_state_dict(deepcopy(states[before]))
            train(loader, acc, ALL)
            whole = whole_state(acc.engine, world)
            found[f"{before} -> {after}"] = flat(whole.model)
            if before == after:
                first, again = ({**one.model, **one.optimizer} for one in (digests[after], whole))
                found[f"{after}, bits"] = all(torch.equal(first[name], again[name]) for name in first)
            acc.close()
    return found


if __name__ == "__main__":
    give(main)
