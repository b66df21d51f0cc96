"""Whether the micro-batch that a rehearsal finds is as fast as the best one: a sweep over fixed sizes beside it.

Windows of the same global batch are run with each size in turn, so that what else the machine does meets all of them.
The rates are those of whole windows, with loading and step, which a rehearsal does not run.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

from hydra import compose
from rich.console import Console
from rich.table import Table

from distaccum.config.checks import AUTO
from distaccum.config.schema import RunConfig, plain
from distaccum.distributed.world import World
from distaccum.train.components import components_from_config
from distaccum.train.micro_batch import find_micro_batch, hardware_of
from distaccum.train.run import build_accumulator
from launch.bench.variant import WindowLoop

MODELS: Mapping[str, Sequence[str]] = {
    "GPT, 0.8M parameters, 128 tokens": (),
    "CNN, images of 8 x 8": ("data=digits", "model=cnn", "loss=cross_entropy"),
}
Figures = dict[str, Any]


def compare(world: World, *, global_size: int, rounds: int) -> Figures:
    """Of each model: the seconds of a window by micro-batch, what was found, and its rate over the best one's."""
    return {name: _compare(list(overrides), world, global_size, rounds) for name, overrides in MODELS.items()}


def _compare(overrides: list[str], world: World, global_size: int, rounds: int) -> Figures:
    config = RunConfig.from_dict(plain(compose("config", overrides)))
    sizes = [2**n for n in range((global_size // world.size).bit_length())]
    loops = {size: WindowLoop(_components(config, world, global_size, size), world) for size in sizes}
    components = _components(config, world, global_size, AUTO)
    accumulator = build_accumulator(components, world)
    found = find_micro_batch(components, accumulator, {}, hardware_of(components, world)).memory
    accumulator.close()
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    for loop in loops.values():
        loop()  # makes what is made once
    for _ in range(rounds):
        for size, loop in loops.items():
            world.barrier()
            began = perf_counter()
            loop()
            seconds[size].append(perf_counter() - began)
    least = {size: min(times) for size, times in seconds.items()}
    chosen = found["micro_size"]
    return {
        "seconds": {size: {"min": min(t), "median": statistics.median(t)} for size, t in seconds.items()},
        "found": {name: found[name] for name in ("micro_size", "reason", "seconds")},
        "rate over the best one's": {
            "min": min(least.values()) / least[chosen],
            "median": min(map(statistics.median, seconds.values())) / statistics.median(seconds[chosen]),
        },
    }


def _components(config: RunConfig, world: World, global_size: int, micro_size: Any) -> Any:
    sized = replace(config, batch=replace(config.batch, global_size=global_size, micro_size=micro_size))
    return components_from_config(sized, world_size=world.size, device=world.device)


def show(figures: Figures) -> None:
    """Prints a table for each model."""
    console = Console()
    for name, row in figures.items():
        table = Table(title=name)
        for column in ("micro-batch", "ms of a window (min)", "(median)"):
            table.add_column(column, justify="right")
        for size, seconds in row["seconds"].items():
            mark = " *" if int(size) == row["found"]["micro_size"] else ""
            table.add_row(f"{size}{mark}", *(f"{1e3 * seconds[kind]:.1f}" for kind in ("min", "median")))
        console.print(table)
        ratio = row["rate over the best one's"]
        found = row["found"]
        console.print(
            f"* found in {found['seconds']:.1f} s: {found['reason']}; its rate is {ratio['min']:.3f} (of the least "
            f"times; {ratio['median']:.3f} of the medians) of the best one's"
        )
