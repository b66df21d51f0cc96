"""What a window costs: a hand-written DDP loop and distaccum, on the same model, data and window.

Operators, reductions, bytes, device reads and Python calls are counted: they do not depend on how busy the machine is.
Times do, so they are taken in pairs, the loops in turn.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import chain, count
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

from distaccum.checkpoint.store import CheckpointStore
from distaccum.config.schema import RunConfig
from distaccum.data.loader import MicroBatchIds
from distaccum.distributed.world import World
from distaccum.engines.modules import HostCopy
from distaccum.testing.counters import OperationCounter
from distaccum.train.components import TrainingComponents
from distaccum.train.loop import Loop, TrainingRun
from distaccum.train.run import build_accumulator, open_parts
from distaccum.train.run_dir import RunDir
from distaccum.verification import replicas
from launch.bench.variant import Step, Variant, handwritten_ddp, loader_of

WARM_UP = 3  # windows: DDP rebuilds its buckets, the optimizer makes its state


def handwritten(components: TrainingComponents, world: World) -> Step:
    """The hand-written loop over a ``DataLoader``; it logs as often as the Trainer."""
    config, plan = components.config, components.plan
    ids = MicroBatchIds(plan, world.rank)
    loader = DataLoader(components.data.train, batch_sampler=ids)

    def epochs() -> Iterator[DataLoader[Any]]:
        for epoch in count():
            ids.seek(epoch, 0)
            yield loader

    return handwritten_ddp(
        components.model,
        *components.optimizers,
        chain.from_iterable(epochs()),  # in C: it adds no Python call to a micro-batch
        world.device,
        policy=components.policy,
        micro_steps=plan.items_of_window,
        clip_norm=config.optim.clip_norm,
        schedule=components.schedule,
        log_every=config.trainer.log_every,
    )


def with_accumulate(components: TrainingComponents, world: World) -> Step:
    """A loop around ``accumulate()``; it logs as often as the Trainer."""
    accumulator, loader = build_accumulator(components, world), loader_of(components, world)
    log_every = components.config.trainer.log_every
    windows = enumerate(chain.from_iterable(accumulator.windows(loader) for _ in count()), 1)

    def step() -> None:
        number, micro_batches = next(windows)
        for micro in micro_batches:
            with accumulator.accumulate():
                inputs, labels = micro.batch
                logits = accumulator.model(inputs)
                flat = logits.flatten(0, -2).float()
                accumulator.backward(nn.functional.cross_entropy(flat, labels.flatten(), reduction="sum"))
        if number % log_every == 0:
            _ = (accumulator.mean_loss(), accumulator.last.grad_norm.item())  # host reads: what such a loop logs

    return step


def with_trainer(components: TrainingComponents, world: World, *, folder: Path) -> Step:
    """The loop of ``distaccum train`` without loggers; its status file is in ``folder``."""
    accumulator, loader = build_accumulator(components, world), loader_of(components, world)
    run_dir = RunDir(folder)
    if world.is_main:
        run_dir.make()
    run = TrainingRun(
        components=components,
        accumulator=accumulator,
        loader=loader,
        run_dir=run_dir,
        store=CheckpointStore(run_dir.checkpoints, keep=0),
        loggers=(),
        wandb_id="",
        began=0.0,
    )
    loop = Loop(run, open_parts(run, None, ExitStack()))
    windows = chain.from_iterable(accumulator.windows(loader) for _ in count())

    def step() -> None:  # what Loop.fit does with each window
        window = next(windows)
        loop.step_window(window)
        assert not loop.at_end

    return step


def count_operations(step: Step, windows: int) -> dict[str, float]:
    """Operators, reductions, bytes and device reads (``item``) per window."""
    with OperationCounter() as operations:
        for _ in range(windows):
            step()
    return {name: total / windows for name, total in operations.counts.items()}


def count_calls(step: Step, windows: int) -> dict[str, float]:
    """Python function calls per window, and the device reads that do not go by ``item``.

    These are ``tolist`` of a tensor on the device, and the first read of a copy in the window that made it, which waits
    for what was queued last. A late read comes in a later window, when that window's work is queued. Those of the
    weights' checksums, which ride in some windows' counts, are told apart.
    """
    calls, reads, late, checksums = 0, 0, 0, 0
    riding: set[int] = set()  # copies of checksums, by id
    fresh: list[HostCopy] = []
    kept: dict[int, HostCopy] = {}  # what was read, by id: kept, so that no other copy gets the id

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls, reads, late, checksums
        calls += event == "call"
        if event == "c_call" and argument.__name__ == "tolist" and isinstance(argument.__self__, Tensor):
            reads += argument.__self__.is_floating_point() and frame.f_code is not World.all_reduce_host.__code__
        elif event == "call" and frame.f_code in (HostCopy.__init__.__code__, HostCopy.read.__code__):
            copy = frame.f_locals["self"]
            if frame.f_code is HostCopy.__init__.__code__:
                fresh.append(copy)
                if frame.f_back is not None and frame.f_back.f_code.co_filename == replicas.__file__:
                    riding.add(id(copy))
                    kept.setdefault(-id(copy), copy)
            elif id(copy) not in kept:
                kept[id(copy)] = copy
                waits, rides = any(copy is one for one in fresh), id(copy) in riding
                reads, late, checksums = reads + waits, late + (not waits and not rides), checksums + rides

    sys.setprofile(note)
    try:
        for _ in range(windows):
            fresh.clear()
            step()
    finally:
        sys.setprofile(None)
    read = {"device reads": reads / windows, "late reads": late / windows, "checksum reads": checksums / windows}
    return {"Python calls": calls / windows, **read}


def peak_bytes(build: Callable[[], Step], windows: int) -> int:
    """The most bytes allocated at once from before the wrapper is built to the end of ``windows`` windows."""
    if torch.cuda.is_available():
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step = build()
        for _ in range(windows):
            step()
        return torch.cuda.max_memory_allocated() - before
    return profiled_peak_bytes(build, windows)


def profiled_peak_bytes(build: Callable[[], Step], windows: int) -> int:
    """The same of a CPU's tensors."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step = build()
        for _ in range(windows):
            step()
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def paired_times(first: Step, second: Step, windows: int, pairs: int) -> list[tuple[float, float]]:
    """Seconds per window of both loops, ``pairs`` times, the loops in turn."""

    def seconds(step: Step) -> float:
        began = perf_counter()
        for _ in range(windows):
            step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return (perf_counter() - began) / windows

    return [(seconds(first), seconds(second)) for _ in range(pairs)]


def compare(config: RunConfig, world: World, folder: Path, *, windows: int, pairs: int) -> dict[str, Any]:
    """The figures of each loop, per window; of the times the minimum and the median of the paired ratios.

    Args:
        config: of the run.
        world: this rank.
        folder: the run directory.
        windows: what a count and a paired timing take.
        pairs: paired timings.
    """
    variants = {
        "hand-written": Variant(make=handwritten),
        "accumulate()": Variant(make=with_accumulate),
        "Trainer": Variant(make=partial(with_trainer, folder=folder / "trainer")),
    }
    figures: dict[str, Any] = {}
    steps = {}
    for name, variant in variants.items():
        components = variant.components(config, world)
        figures["accumulation"] = components.plan.items_of_window
        steps[name] = variant.make(components, world)
        for _ in range(WARM_UP):
            steps[name]()
        counted = count_operations(steps[name], windows)
        called = count_calls(steps[name], windows)
        counted["device reads"] = counted.get("device reads", 0.0) + called.pop("device reads")
        wide = variant.components(wide_and_short(config), world)
        wide.model.to(world.device)  # every loop finds it there: what it takes is no peak of the loop's
        parameters = sum(p.numel() * p.element_size() for p in wide.model.parameters())
        peak = peak_bytes(partial(variant.make, wide, world), windows=4) / parameters
        figures[name] = counted | called | {"peak gradient memory / parameters": peak}
    times = paired_times(steps["Trainer"], steps["hand-written"], windows, pairs)
    ratios = [ours / theirs for ours, theirs in times]
    figures["time ratio"] = {"min": min(ratios), "median": statistics.median(ratios), "pairs": pairs}
    return figures


def wide_and_short(config: RunConfig) -> RunConfig:
    """Gives large weights, few activations and no optimizer state: gradients and buckets are then what is allocated."""
    return replace(
        config,
        data={**config.data, "seq_len": 8},
        model={**config.model, "seq_len": 8, "n_layer": 4, "n_head": 4, "n_embd": 512},
        optim=replace(config.optim, optimizer={"_target_": "torch.optim.SGD", "fused": True}),
    )


def show(figures: dict[str, Any], ranks: int) -> None:
    """Prints a line for each figure, with its ratio to the hand-written loop's."""
    hand, middle, top = figures["hand-written"], figures["accumulate()"], figures["Trainer"]
    plan = f"accumulation {figures['accumulation']}, {ranks} ranks"
    table = Table("per step", "hand-written", "accumulate()", "ratio", "Trainer", "ratio", title=plan)
    for name in dict.fromkeys([*hand, *middle, *top]):
        a, *ours = hand.get(name, 0.0), middle.get(name, 0.0), top.get(name, 0.0)
        table.add_row(name, f"{a:,.2f}", *chain(*((f"{b:,.2f}", f"{b / a:.3f}" if a else "-") for b in ours)))
    table.add_row("time, minimum of pairs", "", "", "", "", f"{figures['time ratio']['min']:.3f}")
    table.add_row("time, median of pairs", "", "", "", "", f"{figures['time ratio']['median']:.3f}")
    Console().print(table)
