"""One rank of the network bench: times and counts windows over the link.

``worker.py FILE`` with a JSON file: ``config`` of the run, ``variants`` (names of :data:`VARIANTS`), ``windows`` (of
each, after a warm-up) and ``out``, a folder to which each rank writes ``RANK.json``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from distaccum.config.schema import RunConfig
from distaccum.distributed.environment import LaunchEnvironment
from distaccum.distributed.world import World, open_world
from distaccum.train.components import TrainingComponents
from distaccum.train.timing import LocalTimer
from launch.bench.variant import Step, Variant, full_windows, handwritten_ddp

WARM_UP = 2  # windows: DDP rebuilds its buckets, the optimizer makes its state, TCP finds its pace
PINGS = 50


def reducing_every(components: TrainingComponents, world: World) -> Step:
    """The loop that comes first to mind: every backward of DDP's reduces."""
    windows = full_windows(components, world)
    return handwritten_ddp(
        components.model,
        *components.optimizers,
        (micro.batch for window in windows for micro in window.micro_batches),
        world.device,
        policy=components.policy,
        micro_steps=components.plan.accumulation_steps,
        reduces_every=True,
        clip_norm=components.config.optim.clip_norm,
    )


HANDWRITTEN = "hand-written DDP"
VARIANTS = {
    HANDWRITTEN: Variant(make=reducing_every),
    "distaccum": Variant(),
    "distaccum, reduce_dtype=bf16": Variant(precision={"reduce_dtype": "bf16"}),
    "distaccum, precision=bf16 too": Variant(precision={"name": "bf16", "reduce_dtype": "bf16"}),
}


def interface_bytes() -> int:
    """Bytes that have left by the interface which the environment names."""
    return int(Path(f"/sys/class/net/{os.environ['GLOO_SOCKET_IFNAME']}/statistics/tx_bytes").read_text())


class Bench:
    """One variant over the link, and the same work without the link."""

    def __init__(self, variant: Variant, config: RunConfig, world: World) -> None:
        self._world = world
        components = variant.components(config, world)
        self._parameters = [parameter.numel() for parameter in components.model.parameters()]
        self._step = variant.make(components, world)
        alone = variant.components(config, world)
        self._local = LocalTimer(alone, world.device)
        self._windows = full_windows(alone, world)
        self._seconds: list[float] = []
        self._bytes: list[int] = []

    def run(self) -> None:
        """Runs a window without the link, on all hosts at once, and one over it."""
        self._world.barrier()
        self._local.run(next(self._windows))
        self._world.barrier()
        before, began = interface_bytes(), perf_counter()
        self._step()
        self._seconds.append(perf_counter() - began)
        self._world.barrier()  # or packets of the other host's last bucket would be counted in the next window
        self._bytes.append(interface_bytes() - before)

    def forget(self) -> None:
        """Drops what was measured so far."""
        self._seconds, self._bytes = [], []
        self._local.forget()

    def figures(self) -> dict[str, Any]:
        """Seconds of each window, the bytes of one that left this host, and what a forecast has to know.

        The median of the windows' bytes: what TCP sends twice on a busy machine is not the window's.
        """
        return {
            "seconds": self._seconds,
            "bytes": median(self._bytes),
            "gradient bytes": 4 * sum(self._parameters),
            "parameters": self._parameters,
            "micro_step_ms": self._local.micro_step_ms,
            "update_ms": self._local.update_ms,
        }


def latency_us(world: World) -> float:
    """Microseconds of one message: a small all-reduce between two ranks is two messages, one after the other."""
    took = []
    for _ in range(PINGS):
        began = perf_counter()
        world.barrier()
        took.append(perf_counter() - began)
    return median(took) / 2 * 1e6


def main() -> None:
    """Measures what the file asks for."""
    asked = json.loads(Path(sys.argv[1]).read_text())
    config, ranks = RunConfig.from_dict(asked["config"]), LaunchEnvironment.from_environment()
    with open_world(ranks, ranks.store(), ranks.device()) as world:
        found: dict[str, Any] = {"latency_us": latency_us(world)}
        benches = {name: Bench(VARIANTS[name], config, world) for name in asked["variants"]}
        for i in range(WARM_UP + asked["windows"]):
            for bench in benches.values():  # in turn: a machine that is busy for a while delays all of them
                if i == WARM_UP:
                    bench.forget()
                bench.run()
        found |= {name: bench.figures() for name, bench in benches.items()}
        (Path(asked["out"]) / f"{world.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
