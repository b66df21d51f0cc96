"""One rank of ``link.py``: times and counts windows over the link. ``link_worker.py FILE``: what to do, and where to.

The file is JSON: ``config`` (of the run), ``ways`` (names of :data:`WAYS`), ``windows`` (of each, after a warm-up) and
``out``, a folder to which each rank writes ``RANK.json``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, count
from pathlib import Path
from statistics import mean, median
from time import perf_counter
from typing import Any

from link_timing import Local
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from distaccum.accumulation.step import run_window
from distaccum.config.schema import RunConfig
from distaccum.data.counter import GlobalCounter
from distaccum.data.factory import build_loader
from distaccum.data.window import Window
from distaccum.distributed.environment import LaunchEnvironment
from distaccum.distributed.world import World, open_world
from distaccum.engines.factory import create_engine
from distaccum.train.components import TrainingComponents, components_from_config

WARM_UP = 2  # windows: DDP rebuilds its buckets, the optimizer makes its state, TCP finds its pace
PINGS = 50
Step = Callable[[Window], None]


@dataclass(frozen=True, kw_only=True)
class Way:
    """A loop: ``make`` builds it; ``precision``: settings in place of the run's; ``every``: reduces each micro-step."""

    make: Callable[[TrainingComponents, World], Step]
    precision: dict[str, str] = field(default_factory=dict)
    every: bool = False

    def config(self, config: RunConfig) -> RunConfig:
        """The run's, in this precision."""
        return replace(config, precision=replace(config.precision, **self.precision))


def handwritten(parts: TrainingComponents, world: World) -> Step:
    """The loop that comes first to mind: every backward of DDP's reduces."""
    model, (optimizer,) = DistributedDataParallel(parts.model.to(world.device)), parts.optimizers

    def step(window: Window) -> None:
        for micro in window.micro_batches:
            inputs, labels = micro.batch
            with parts.policy.autocast(world.device):
                logits = model(inputs)
            loss = functional.cross_entropy(logits.flatten(0, -2).float(), labels.flatten())
            (loss / len(window.micro_batches)).backward()
        if parts.config.optim.clip_norm:
            nn.utils.clip_grad_norm_(model.parameters(), parts.config.optim.clip_norm)
        optimizer.step()
        optimizer.zero_grad()

    return step


def distaccum(parts: TrainingComponents, world: World) -> Step:
    """The same update by ``run_window``: nothing is reduced before the boundary."""
    config = parts.config
    engine = create_engine(
        parts.model,
        parts.optimizers,
        world,
        engine=config.engine,
        precision=config.precision,
        clip_norm=config.optim.clip_norm,
        clip_value=config.optim.clip_value,
    )

    def step(window: Window) -> None:
        assert run_window(engine, window, parts.loss).applied

    return step


WAYS = {
    "hand-written DDP": Way(make=handwritten, every=True),
    "distaccum": Way(make=distaccum),
    "distaccum, reduce_dtype=bf16": Way(make=distaccum, precision={"reduce_dtype": "bf16"}),
    "distaccum, precision=bf16 too": Way(make=distaccum, precision={"name": "bf16", "reduce_dtype": "bf16"}),
}


def interface_bytes() -> int:
    """That have left by the interface which the environment names."""
    return int(Path(f"/sys/class/net/{os.environ['GLOO_SOCKET_IFNAME']}/statistics/tx_bytes").read_text())


def windows_of(parts: TrainingComponents, world: World) -> Iterator[Window]:
    """Without an end."""
    feed, tally = build_loader(parts.data, parts.plan, world), GlobalCounter(world, parts.loss.count)
    full = parts.plan.accumulation_steps
    every = chain.from_iterable(feed.windows(epoch, 0, tally) for epoch in count())
    return (window for window in every if len(window.micro_batches) == full)


class Rig:
    """One way, and the same work without the link beside it."""

    def __init__(self, way: Way, config: RunConfig, world: World) -> None:
        config, place = way.config(config), {"world_size": world.size, "device": world.device}
        parts: TrainingComponents = components_from_config(config, **place)
        self._world, self._feed = world, windows_of(parts, world)
        self._parameters = [parameter.numel() for parameter in parts.model.parameters()]
        self._step, self._local = way.make(parts, world), Local(components_from_config(config, **place), world.device)
        self._seconds: list[float] = []
        self._bytes: list[int] = []

    def run(self) -> None:
        """A window without the link, on all hosts at once, and one over it."""
        self._world.barrier()
        self._local.run(next(self._feed))
        self._world.barrier()
        before, began = interface_bytes(), perf_counter()
        self._step(next(self._feed))
        self._seconds.append(perf_counter() - began)
        self._world.barrier()  # or packets of the other host's last bucket would be counted in the next window
        self._bytes.append(interface_bytes() - before)

    def forget(self) -> None:
        """What was measured so far."""
        self._seconds, self._bytes = [], []
        self._local.forget()

    def found(self) -> dict[str, Any]:
        """Seconds of each window; bytes of the mean one that left this host; what a forecast is told."""
        return {
            "seconds": self._seconds,
            "bytes": mean(self._bytes),
            "gradient bytes": 4 * sum(self._parameters),
            "parameters": self._parameters,
            "micro_step_ms": self._local.micro_step_ms,
            "update_ms": self._local.update_ms,
        }


def latency_us(world: World) -> float:
    """Of one message: a small all-reduce between two ranks is two, one after the other."""
    took = []
    for _ in range(PINGS):
        began = perf_counter()
        world.barrier()
        took.append(perf_counter() - began)
    return median(took) / 2 * 1e6


def main() -> None:
    """All that was asked for."""
    asked = json.loads(Path(sys.argv[1]).read_text())
    config, ranks = RunConfig.from_dict(asked["config"]), LaunchEnvironment.from_environment()
    with open_world(ranks, ranks.store(), ranks.device()) as world:
        found: dict[str, Any] = {"latency_us": latency_us(world)}
        rigs = {name: Rig(WAYS[name], config, world) for name in asked["ways"]}
        for i in range(WARM_UP + asked["windows"]):
            for rig in rigs.values():  # in turn, so that a machine that is busy for a while is so for all of them
                if i == WARM_UP:
                    rig.forget()
                rig.run()
        found |= {name: rig.found() for name, rig in rigs.items()}
        (Path(asked["out"]) / f"{world.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
