"""What ``numerics=reproducible`` costs beside ``fast``: times in pairs, bytes and calls on the wire, bytes held.

Both run the same windows, of which every rank has as many micro-batches, in turn; deterministic kernels are on for
both, and ranks have one thread each. What is held more are the sums of blocks: tensors that are there at the boundary.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Mapping
from dataclasses import replace
from time import perf_counter, sleep
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from distaccum.config.checks import NUMERICS
from distaccum.config.engine import engine_config
from distaccum.config.schema import RunConfig
from distaccum.distributed.world import World
from distaccum.testing.counters import CollectiveCounter
from distaccum.train.components import components_from_config
from distaccum.train.determinism import deterministic
from launch.bench.memory import live_storages
from launch.bench.variant import WindowLoop

ENGINES = ("ddp", "zero1", "fsdp2")
WARM_UP, SETTLE_S = 2, 0.02
Figures = dict[str, Any]


def compare(config: RunConfig, world: World, *, units: int, pairs: int, model: Mapping[str, Any]) -> Figures:
    """The figures by engine.

    Args:
        config: of a run with tokens.
        world: this rank.
        units: micro-batches of a rank's window.
        pairs: windows of each that are timed.
        model: replaces settings of the model.
    """
    found: Figures = {"ranks": world.size, "units": units}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with deterministic(True):
        for engine in ENGINES:
            found[engine] = _of_engine(_sized(config, world, engine, units, model), world, pairs)
    torch.set_num_threads(threads)
    return found


def _sized(config: RunConfig, world: World, engine: str, units: int, model: Mapping[str, Any]) -> RunConfig:
    size = config.batch.first_micro_size
    return replace(
        config,
        engine=engine_config(engine),
        batch=replace(config.batch, global_size=world.size * units * size, micro_size=size),
        model={**config.model, **model},
        optim=replace(config.optim, fused=False),  # as fsdp2 steps shards to the same bits
        trainer=replace(config.trainer, verify="never"),
    )


def _of_engine(config: RunConfig, world: World, pairs: int) -> Figures:
    gc.collect()
    loops: dict[str, WindowLoop] = {}
    found: Figures = {}
    for numerics in NUMERICS:
        gc.collect()
        before = sum(live_storages().values())
        components = components_from_config(
            replace(config, numerics=numerics), world_size=world.size, device=world.device
        )
        found["parameters"] = components.parameters
        loops[numerics] = WindowLoop(components, world)
        del components
        for _ in range(WARM_UP):
            loops[numerics]()
        found[numerics] = _counted(loops[numerics], world, before)
    seconds: dict[str, list[float]] = {numerics: [] for numerics in NUMERICS}
    for _ in range(pairs):
        for numerics, loop in loops.items():
            world.barrier()
            began = perf_counter()
            loop()
            seconds[numerics].append(perf_counter() - began)
    ratios = sorted(slow / fast for fast, slow in zip(*seconds.values(), strict=True))
    least, median = ([of(times) for times in seconds.values()] for of in (min, statistics.median))
    found["time over fast"] = {
        "min": least[1] / least[0],
        "median": median[1] / median[0],
        "of pairs": statistics.median(ratios),
    }
    found["seconds"] = {name: {"min": min(t), "median": statistics.median(t)} for name, t in seconds.items()}
    return found


def _counted(loop: WindowLoop, world: World, before: int) -> Figures:
    """Calls and payload of a window, and the bytes of tensors at its boundary, on the rank with most.

    Args:
        loop: runs windows.
        world: this rank.
        before: bytes that were there before the loop was made.
    """
    with CollectiveCounter() as counter:
        loop()
    held: list[int] = []

    def look() -> None:
        sleep(SETTLE_S)
        held.append(sum(live_storages().values()))

    loop(before_boundary=look)
    return {
        "calls": {kind: n for kind, n in counter.calls.items() if kind != "control"},
        "payload": {kind: n for kind, n in counter.payload.items() if kind != "control"},
        "held at the boundary": max(world.all_gather_object(held[0] - before)),
    }


def show(figures: Figures) -> None:
    """Prints a table."""
    table = Table(title=f"numerics=reproducible on {figures['ranks']} ranks, {figures['units']} units each")
    for column in (
        "engine",
        "numerics",
        "ms of a window (min)",
        "(median)",
        "time",
        "MiB reduced",
        "MiB at the boundary",
    ):
        table.add_column(column, justify="left" if column in ("engine", "numerics") else "right")
    for engine in ENGINES:
        row = figures[engine]
        for numerics in NUMERICS:
            one, seconds, over = row[numerics], row["seconds"][numerics], row["time over fast"]
            payload = one["payload"]
            reduced = payload.get("all-reduce", 0) + payload.get("reduce-scatter", 0) + payload.get("all-to-all", 0)
            ratio = "1" if numerics == "fast" else f"{over['min']:.3f} ({over['median']:.3f})"
            numbers = [f"{1e3 * seconds[kind]:.1f}" for kind in ("min", "median")]
            mib = [f"{size / 2**20:.1f}" for size in (reduced, one["held at the boundary"])]
            table.add_row(engine, numerics, *numbers, ratio, *mib)
    Console().print(table)
