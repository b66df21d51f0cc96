"""Whether loading is hidden behind computing: a window's time over the longer of the two, next to a plain loop's.

A sample sleeps for a stated time where it is loaded, and so does a micro-batch where it is computed: neither takes a
core, so that two cores are enough to measure four loading processes. Loading, divided by the number of processes, takes
as long as the sleep of computing, which leaves no slack: a loop that hides nothing takes twice the time.

What a loop has loaded while the others were measured would flatter it, so each drains that first.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, count
from time import perf_counter, sleep
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from distaccum import Accumulator
from distaccum.config.precision import PrecisionConfig
from distaccum.data.loader import MicroBatchIds
from distaccum.data.plan.batch import BatchPlan
from distaccum.distributed.world import World
from distaccum.precision.policy import PrecisionPolicy
from launch.bench.variant import Step, handwritten_ddp

WINDOWS_OF_EPOCH = 100
FEATURES, CLASSES = 16, 4
LOOPS = ("hand-written", "prefetch_windows=0", "prefetch_windows=1")
Figures = dict[str, Any]


class Slow(Dataset[tuple[Tensor, Tensor]]):
    """Samples that take a stated time, without a core."""

    def __init__(self, samples: TensorDataset, seconds: float) -> None:
        self._samples, self._seconds = samples, seconds

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        sleep(self._seconds)
        inputs, label = self._samples[index]
        return inputs, label


class Computing(nn.Module):
    """A layer whose forward takes a stated time, without a core, as on a device that the host waits for."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._layer, self._seconds = nn.Linear(FEATURES, CLASSES), seconds

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits of shape (samples, classes) of inputs of shape (samples, features)."""
        sleep(self._seconds)
        logits: Tensor = self._layer(inputs)
        return logits


def _samples(accumulation: int, world: World) -> TensorDataset:
    size = accumulation * world.size * WINDOWS_OF_EPOCH
    return TensorDataset(torch.ones(size, FEATURES), torch.zeros(size, dtype=torch.long))


def ours(world: World, data: Any, accumulation: int, computing: float, *, prefetch_windows: int) -> Step:
    """A loop around ``accumulate()``, with micro-batches of one sample."""
    model = Computing(computing)
    accumulator = Accumulator(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        global_batch_size=accumulation * world.size,
        micro_batch_size=1,
        count=lambda batch: len(batch[1]),
        verify="never",
        prefetch_windows=prefetch_windows,
        world=world,
    )
    windows = chain.from_iterable(accumulator.windows(data) for _ in count())

    def step() -> None:
        for micro in next(windows):
            with accumulator.accumulate():
                inputs, labels = micro.batch
                logits = accumulator.model(inputs)
                accumulator.backward(nn.functional.cross_entropy(logits, labels, reduction="sum"))

    return step


def by_hand(world: World, data: Dataset[Any], workers: int, accumulation: int, computing: float) -> Step:
    """The hand-written loop over a ``DataLoader`` with as many processes and torch's own prefetching."""
    plan = BatchPlan(
        samples=len(data),  # type: ignore[arg-type]  # torch's Dataset declares no length
        global_batch_size=accumulation * world.size,
        micro_batch_size=1,
        world_size=world.size,
    )
    ids = MicroBatchIds(plan, world.rank)
    loader = DataLoader(data, batch_sampler=ids, num_workers=workers, persistent_workers=True)

    def epochs() -> Iterator[DataLoader[Any]]:
        for epoch in count():
            ids.seek(epoch, 0)
            yield loader

    model = Computing(computing)
    return handwritten_ddp(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        chain.from_iterable(epochs()),
        world.device,
        policy=PrecisionPolicy.of(PrecisionConfig.of("fp32")),
        micro_steps=accumulation,
    )


def measure(world: World, *, accumulation: int, workers: int, loading_ms: float, windows: int, pairs: int) -> Figures:
    """Seconds per window of each loop, in turn; and of computing alone, with samples that are there at once.

    Args:
        world: this rank.
        accumulation: micro-batches of a window on each rank.
        workers: loading processes of each rank.
        loading_ms: what a micro-batch sleeps in one of them.
        windows: of each loop that one paired timing takes, after as many that drain what was loaded ahead.
        pairs: paired timings.
    """
    samples, computing = _samples(accumulation, world), loading_ms / 1000 / workers
    slow = Slow(samples, loading_ms / 1000)
    loader = partial(DataLoader, slow, batch_size=1, num_workers=workers, persistent_workers=True)
    steps = {
        "computing": ours(world, samples, accumulation, computing, prefetch_windows=0),
        "hand-written": by_hand(world, slow, workers, accumulation, computing),
        "prefetch_windows=0": ours(world, loader(), accumulation, computing, prefetch_windows=0),
        "prefetch_windows=1": ours(world, loader(), accumulation, computing, prefetch_windows=1),
    }
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(pairs):
        for name, step in steps.items():
            for _ in range(windows):
                step()
            began = perf_counter()
            for _ in range(windows):
                step()
            seconds[name].append((perf_counter() - began) / windows)
    loading = accumulation * computing
    bounds = [max(loading, alone) for alone in seconds["computing"]]
    return {
        "accumulation": accumulation,
        "workers": workers,
        "loading_s": loading,
        "computing_s": statistics.median(seconds["computing"]),
        "loops": {name: _ratios(seconds[name], bounds) for name in LOOPS},
        "to hand-written": _ratios(seconds[LOOPS[-1]], seconds["hand-written"]),
    }


def _ratios(seconds: Sequence[float], others: Sequence[float]) -> Figures:
    ratios = [one / other for one, other in zip(seconds, others, strict=True)]
    return {"seconds": statistics.median(seconds), "min": min(ratios), "median": statistics.median(ratios)}


def compare(
    world: World, *, accumulations: Sequence[int], workers: Sequence[int], loading_ms: float, windows: int, pairs: int
) -> Figures:
    """The figures of each accumulation and number of loading processes: see :func:`measure`."""
    rows = [
        measure(world, accumulation=steps, workers=number, loading_ms=loading_ms, windows=windows, pairs=pairs)
        for steps in accumulations
        for number in workers
    ]
    return {"loading_ms": loading_ms, "pairs": pairs, "ranks": world.size, "rows": rows}


def show(figures: Figures) -> None:
    """Prints each loop's window time over the longer of loading and computing: minimum and median of the pairs."""
    title = f"a window over the longer of loading and computing: minimum / median of {figures['pairs']} pairs"
    table = Table("accumulation", "workers", "loading s", "computing s", *LOOPS, "over hand-written", title=title)
    for row in figures["rows"]:
        cells = [*(row["loops"][name] for name in LOOPS), row["to hand-written"]]
        shown = [f"{cell['min']:.3f} / {cell['median']:.3f}" for cell in cells]
        times = [f"{row[key]:.3f}" for key in ("loading_s", "computing_s")]
        table.add_row(str(row["accumulation"]), str(row["workers"]), *times, *shown)
    Console().print(table)
