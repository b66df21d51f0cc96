"""One rank of the network bench: times and counts windows over the link.

``worker.py FILE`` with a JSON file: ``config`` of the run, ``variants`` (names of :data:`VARIANTS`), ``windows`` (of
each, after a warm-up) and ``out``, a folder to which each rank writes ``RANK.json``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from functools import partial
from itertools import chain, count
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from torch.utils.data import DataLoader

from distaccum.config.schema import RunConfig
from distaccum.data.loader import MicroBatchIds
from distaccum.distributed.environment import LaunchEnvironment
from distaccum.distributed.world import World, open_world
from distaccum.tools.plan.timing import LocalTimer
from distaccum.train.components import TrainingComponents
from distaccum.train.run import build_accumulator
from launch.bench.variant import Step, Variant, full_windows, handwritten_ddp, loader_of

WARM_UP = 2  # windows: DDP rebuilds its buckets, the optimizer makes its state, TCP finds its pace
PINGS, COUNTS = 50, 500


def by_hand(components: TrainingComponents, world: World, *, reduces_every: bool) -> Step:
    """A hand-written loop over a ``DataLoader``, without a count: it divides by the number of micro-batches.

    ``reduces_every``: the loop that comes first to mind, in which every backward of DDP's reduces.
    """
    ids = MicroBatchIds(components.plan, world.rank)
    loader = DataLoader(components.data.train, batch_sampler=ids)

    def epochs() -> Iterator[DataLoader[Any]]:
        for epoch in count():
            ids.seek(epoch, 0)
            yield loader

    return handwritten_ddp(
        components.model,
        *components.optimizers,
        chain.from_iterable(epochs()),
        world.device,
        policy=components.policy,
        micro_steps=components.plan.items_of_window,
        reduces_every=reduces_every,
        clip_norm=components.config.optim.clip_norm,
    )


class CountedLoop:
    """The windows of an ``Accumulator``, with all that rides in their counts; each count is timed on its own."""

    def __init__(self, components: TrainingComponents, world: World) -> None:
        self._accumulator, self._loss = build_accumulator(components, world), components.loss
        loader = loader_of(components, world)
        self._windows = chain.from_iterable(self._accumulator.windows(loader) for _ in count())
        self.counting_s = 0.0
        """Seconds of the counts since somebody set it to 0: a wait for the other rank, and the messages."""
        counter: Any = self._accumulator._counter
        self._all_reduce, counter.all_reduce = counter.all_reduce, self._timed

    def _timed(self, *arguments: Any, **options: Any) -> Any:
        began = perf_counter()
        counted = self._all_reduce(*arguments, **options)
        self.counting_s += perf_counter() - began
        return counted

    def alone(self, times: int) -> list[float]:
        """Seconds of counts one after the other, without windows between them."""
        found = []
        for _ in range(times):
            self.counting_s = 0.0
            self._timed([])
            found.append(self.counting_s)
        return found

    def __call__(self) -> None:
        """Runs a window."""
        self._accumulator.step(next(self._windows), self._loss)


HANDWRITTEN, ONCE = "hand-written DDP", "hand-written, no_sync"
VARIANTS = {
    HANDWRITTEN: Variant(make=partial(by_hand, reduces_every=True)),
    ONCE: Variant(make=partial(by_hand, reduces_every=False)),
    "distaccum": Variant(make=CountedLoop),
    "distaccum, reduce_dtype=bf16": Variant(make=CountedLoop, precision={"reduce_dtype": "bf16"}),
    "distaccum, precision=bf16 too": Variant(make=CountedLoop, precision={"name": "bf16", "reduce_dtype": "bf16"}),
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
        self._counting: list[float] = []
        self._bytes: list[int] = []

    def run(self) -> None:
        """Runs a window without the link, on all hosts at once, and one over it."""
        self._world.barrier()
        self._local.run(next(self._windows))
        counted = self._step if isinstance(self._step, CountedLoop) else None
        if counted is not None:
            counted.counting_s = 0.0
        self._world.barrier()
        before, began = interface_bytes(), perf_counter()
        self._step()
        self._seconds.append(perf_counter() - began)
        if counted is not None:
            self._counting.append(counted.counting_s)
        self._world.barrier()  # or packets of the other host's last bucket would be counted in the next window
        self._bytes.append(interface_bytes() - before)

    def forget(self) -> None:
        """Drops what was measured so far."""
        self._seconds, self._counting, self._bytes = [], [], []
        self._local.forget()

    def figures(self) -> dict[str, Any]:
        """Seconds of each window and of its count, the bytes that left this host, and what a forecast has to know.

        The median of the windows' bytes: what TCP sends twice on a busy machine is not the window's.
        """
        return {
            "seconds": self._seconds,
            "counting": self._counting,
            "counting alone": self._step.alone(COUNTS) if isinstance(self._step, CountedLoop) else [],
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
