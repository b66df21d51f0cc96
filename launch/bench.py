"""What a window costs: a hand-written DDP loop and distaccum, on the same model, data and window.

``python launch/bench.py`` or ``torchrun --nproc-per-node=2 launch/bench.py``, with Hydra overrides. Everything but the
time is counted, and does not depend on how busy the machine is; times are paired, the loops in turn.
``exactness=true`` compares gradients instead: distaccum's and other frameworks' with that of the global batch.
``boundary=true`` measures what follows the last backward alone: unscaling, clipping and the step.
``engines=true`` measures what a rank holds and sends with each engine.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from time import perf_counter
from typing import Any

import boundary
import engine_tables
import engines
import exactness
import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

from distaccum.accumulation.accumulator import Accumulator
from distaccum.checkpoint.store import CheckpointStore
from distaccum.config.schema import RunConfig, conf_dir, plain
from distaccum.data.factory import build_loader
from distaccum.data.loader import MicroBatchIds
from distaccum.data.prefetch import to_device
from distaccum.distributed.environment import LaunchEnvironment
from distaccum.distributed.world import World, open_world
from distaccum.engines.host_copy import HostCopy
from distaccum.testing.counters import OperationCounter
from distaccum.train.components import TrainingComponents, components_from_config
from distaccum.train.loop import Loop
from distaccum.train.run_dir import RunDir
from distaccum.train.time_limit import TimeLimit

Step = Callable[[], None]


def handwritten(parts: TrainingComponents, world: World) -> Step:
    """One window of the loop that people write: DDP, no_sync, GradScaler, clip, step, zero_grad; logs as often."""
    model, (optimizer,) = parts.model, parts.optimizers
    ddp = DistributedDataParallel(model)
    scaler = torch.amp.GradScaler(world.device.type, enabled=parts.policy.scales_loss)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, parts.schedule)
    ids = MicroBatchIds(parts.plan, world.rank)
    loader = DataLoader(parts.data.train, batch_sampler=ids)
    accumulation, clip_norm = parts.plan.accumulation_steps, parts.config.optim.clip_norm
    log_every, windows = parts.config.trainer.log_every, 0

    def epochs() -> Iterator[DataLoader[Any]]:
        for epoch in count():
            ids.seek(epoch, 0)
            yield loader

    batches = chain.from_iterable(epochs())  # in C: no Python call of its own for a micro-batch

    def window() -> None:
        nonlocal windows
        running = torch.zeros((), device=world.device)
        for i in range(accumulation):
            inputs, labels = to_device(next(batches), world.device)
            with nullcontext() if i == accumulation - 1 else ddp.no_sync(), parts.policy.autocast(world.device):
                logits = ddp(inputs)
                loss = nn.functional.cross_entropy(logits.flatten(0, -2).float(), labels.flatten()) / accumulation
                scaler.scale(loss).backward()
            running = running + loss.detach()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip_norm) if clip_norm else None
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad()
        windows += 1
        if windows % log_every == 0:
            _ = (running.item(), norm.item() if norm is not None else None)  # as loops log: one read a number

    return window


def with_accumulate(parts: TrainingComponents, world: World) -> Step:
    """The same window in a loop of one's own with ``accumulate()``; logs as often."""
    accumulator, log_every = accumulator_of(parts, world), parts.config.trainer.log_every
    feed = build_loader(parts.data, parts.plan, world)
    windows = enumerate(chain.from_iterable(accumulator.windows(feed) for _ in count()), 1)

    def window() -> None:
        number, micro_batches = next(windows)
        for micro in micro_batches:
            with accumulator.accumulate():
                inputs, labels = micro.batch
                logits = accumulator.model(inputs)
                flat = logits.flatten(0, -2).float()
                accumulator.backward(nn.functional.cross_entropy(flat, labels.flatten(), reduction="sum"))
        if number % log_every == 0:
            _ = (accumulator.mean_loss(), accumulator.last.grad_norm.item())  # host reads: what such a loop logs

    return window


def accumulator_of(parts: TrainingComponents, world: World) -> Accumulator:
    """As ``distaccum-train`` makes it."""
    config = parts.config
    return Accumulator(
        parts.model,
        parts.optimizers,
        global_batch_size=config.batch.global_size,
        micro_batch_size=config.batch.micro_size,
        count=parts.loss.count,
        schedule=parts.schedule,
        clip_norm=config.optim.clip_norm,
        clip_value=config.optim.clip_value,
        nonfinite=config.trainer.nonfinite,
        max_skips=config.trainer.max_skips,
        engine=config.engine,
        precision=config.precision,
        prefetch=config.trainer.prefetch,
        world=world,
    )


def with_trainer(parts: TrainingComponents, world: World) -> Step:
    """One window of the loop of ``distaccum-train``: its own code, status file included, without sinks."""
    accumulator, feed = accumulator_of(parts, world), build_loader(parts.data, parts.plan, world)
    run_dir = RunDir(Path(HydraConfig.get().runtime.output_dir) / "trainer")
    if world.is_main:
        run_dir.make()
    loop = Loop(
        parts,
        accumulator,
        feed,
        run_dir=run_dir,
        store=CheckpointStore(run_dir.checkpoints, keep=0),
        loggers=(),
        wandb_id="",
        time_limit=TimeLimit(None, began=0.0, parameters=parts.parameters),
    )
    windows = chain.from_iterable(accumulator.windows(feed) for _ in count())

    def window() -> None:  # what Loop.fit does with each of them
        taken = next(windows)
        loop.step_window(taken)
        assert not loop.at_end

    return window


def count_operations(step: Step, windows: int) -> dict[str, float]:
    """Operators, reductions, bytes and device reads (``item``) per window."""
    with OperationCounter() as operations:
        for _ in range(windows):
            step()
    return {name: total / windows for name, total in operations.counts.items()}


def count_calls(step: Step, windows: int) -> dict[str, float]:
    """Python function calls per window, and device reads that ``item`` has no part in.

    Those are ``tolist``, where a tensor lies on the device, and the first read of a copy in the window that made it:
    it waits for what was queued last. Late reads are those in a later window, with the work of that one queued.
    """
    calls, reads, late = 0, 0, 0
    fresh: list[HostCopy] = []
    kept: dict[int, HostCopy] = {}  # those read, so that no other one gets the id

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls, reads, late
        calls += event == "call"
        if event == "c_call" and argument.__name__ == "tolist" and isinstance(argument.__self__, Tensor):
            reads += argument.__self__.is_floating_point() and frame.f_code is not World.all_reduce_host.__code__
        elif event == "call" and frame.f_code in (HostCopy.__init__.__code__, HostCopy.read.__code__):
            copy = frame.f_locals["self"]
            if frame.f_code is HostCopy.__init__.__code__:
                fresh.append(copy)
            elif id(copy) not in kept:
                kept[id(copy)] = copy
                waits = any(copy is one for one in fresh)
                reads, late = reads + waits, late + (not waits)

    sys.setprofile(note)
    try:
        for _ in range(windows):
            fresh.clear()
            step()
    finally:
        sys.setprofile(None)
    return {"Python calls": calls / windows, "device reads": reads / windows, "late reads": late / windows}


def peak_bytes(build: Callable[[], Step], windows: int) -> int:
    """The most bytes allocated at once from before the wrapper is built to the end of ``windows`` windows."""
    if torch.cuda.is_available():
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step = build()
        for _ in range(windows):
            step()
        return torch.cuda.max_memory_allocated() - before
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
    """Seconds a window of both, in turn, ``pairs`` times."""

    def seconds(step: Step) -> float:
        began = perf_counter()
        for _ in range(windows):
            step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return (perf_counter() - began) / windows

    return [(seconds(first), seconds(second)) for _ in range(pairs)]


def measure(config: RunConfig, world: World, *, windows: int, pairs: int) -> dict[str, Any]:
    """All figures of the loops."""
    loops = {"hand-written": handwritten, "accumulate()": with_accumulate, "Trainer": with_trainer}
    place = {"world_size": world.size, "device": world.device}
    figures: dict[str, Any] = {}
    steps = {}
    for name, make in loops.items():
        parts = components_from_config(config, **place)
        figures["accumulation"] = parts.plan.accumulation_steps
        steps[name] = make(parts, world)
        for _ in range(3):  # DDP rebuilds its buckets, the optimizer makes its state
            steps[name]()
        counted = count_operations(steps[name], windows)
        called = count_calls(steps[name], windows)
        counted["device reads"] = counted.get("device reads", 0.0) + called.pop("device reads")
        wide = components_from_config(wide_and_short(config), **place)
        parameters = sum(p.numel() * p.element_size() for p in wide.model.parameters())
        peak = peak_bytes(lambda make=make, wide=wide: make(wide, world), windows=4) / parameters
        figures[name] = counted | called | {"peak gradient memory / parameters": peak}
    times = paired_times(steps["Trainer"], steps["hand-written"], windows, pairs)
    ratios = [ours / theirs for ours, theirs in times]
    figures["time ratio"] = {"min": min(ratios), "median": statistics.median(ratios), "pairs": pairs}
    return figures


def wide_and_short(config: RunConfig) -> RunConfig:
    """Large weights, few activations and no optimizer state: what is allocated then is gradients and buckets."""
    return replace(
        config,
        data={**config.data, "seq_len": 8},
        model={**config.model, "seq_len": 8, "n_layer": 4, "n_head": 4, "n_embd": 512},
        optim=replace(config.optim, optimizer={"_target_": "torch.optim.SGD", "fused": True}),
    )


def show(figures: dict[str, Any], plan: str) -> None:
    """Prints the table."""
    hand, middle, top = figures["hand-written"], figures["accumulate()"], figures["Trainer"]
    table = Table("per window", "hand-written", "accumulate()", "ratio", "Trainer", "ratio", title=plan)
    for name in dict.fromkeys([*hand, *middle, *top]):
        a, *ours = hand.get(name, 0.0), middle.get(name, 0.0), top.get(name, 0.0)
        table.add_row(name, f"{a:,.2f}", *chain(*((f"{b:,.2f}", f"{b / a:.3f}" if a else "-") for b in ours)))
    table.add_row("time, minimum of pairs", "", "", "", "", f"{figures['time ratio']['min']:.3f}")
    table.add_row("time, median of pairs", "", "", "", "", f"{figures['time ratio']['median']:.3f}")
    Console().print(table)


def run(node: DictConfig) -> None:
    """One benchmark, on this rank."""
    values = plain(node)
    options, compares, at_boundary = values.pop("bench"), values.pop("exactness"), values.pop("boundary")
    all_engines = values.pop("engines")
    sizes = options.pop("boundary_sizes")
    config, ranks = RunConfig.from_dict(values), LaunchEnvironment.from_environment()
    with open_world(ranks, ranks.store(), ranks.device()) as world:
        if compares:
            figures = exactness.compare(world)
        elif at_boundary:
            figures = boundary.compare(world, sizes, pairs=options["pairs"])
        elif all_engines:
            figures = engines.compare(config, world)
        else:
            figures = measure(config, world, **options)
        if world.is_main:
            if compares:
                exactness.show(figures, world)
            elif at_boundary:
                boundary.show(figures, world.device)
            elif all_engines:
                engine_tables.show(figures, Path(HydraConfig.get().runtime.output_dir) / "engines.md")
            else:
                show(figures, f"accumulation {figures['accumulation']}, {world.size} ranks")
            (Path(HydraConfig.get().runtime.output_dir) / "bench.json").write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    hydra.main(config_path=str(conf_dir()), config_name="bench", version_base="1.3")(run)()
