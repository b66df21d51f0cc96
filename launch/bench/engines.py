"""What each engine holds on a rank and sends in a window: measured, and by the theory.

Memory is the tensors that the process holds, found by walking them all (``memory.py``), at four moments of a window,
and what the C library (on a GPU: torch's allocator) has given out, from which nothing can hide. Traffic is the
collectives that torch dispatches, whoever calls them.

The theory is that of ``distaccum.tools.plan``: memory by the ZeRO paper's table 1 for fp32; traffic as what has to be
sent. DeepSpeed's stages may send otherwise, so its traffic is the paper's: a reduce-scatter and an all-gather (section
7.2), at stage 3 with two gathers per micro-step. Bytes sent are those of a rank where a collective goes around a ring,
the least that it can send; the payload is that of the whole tensor.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from time import sleep
from typing import Any

import torch

from distaccum.config.engine import EngineConfig, settings_of
from distaccum.config.schema import RunConfig
from distaccum.distributed.world import World
from distaccum.testing.counters import CollectiveCounter
from distaccum.tools.plan import volume as theory
from distaccum.tools.plan.collectives import KINDS, ring_bytes
from distaccum.tools.plan.sharding import sharding_of
from launch.bench.memory import MemoryUse, allocated, live_storages
from launch.bench.variant import Variant, WindowLoop

ACCUMULATION, MICRO_SIZE, LENGTH = 4, 2, 32
SHAPE = {"n_layer": 6, "n_head": 4, "n_embd": 192}  # 2.7 million parameters, whose rows 2, 3 and 4 ranks share evenly
PARAMETERS = 4  # bytes an element
SETTLE_S = 0.02  # seconds: gloo's threads drop what they have sent a moment after it has arrived
WARM_UP = 2  # windows: the optimizer makes its state in the first
GENERATOR = torch.get_rng_state().nbytes  # a micro-step draws numbers of its own, and keeps the outer state meanwhile
REDUCTIONS = KINDS[:3]
Figures = dict[str, Any]


def _engine(name: str, **options: Any) -> EngineConfig:
    return settings_of(name)(**options)


VARIANTS = {
    "ddp": Variant(engine=_engine("ddp")),
    "zero1": Variant(engine=_engine("zero1")),
    "fsdp2, sync=boundary": Variant(engine=_engine("fsdp2")),
    "fsdp2, sync=every": Variant(engine=_engine("fsdp2", sync="every")),
    **{
        f"deepspeed, stage={stage}": Variant(engine=_engine("deepspeed", stage=stage), needs="deepspeed")
        for stage in (0, 1, 2, 3)
    },
}


def sized(config: RunConfig, world: World) -> RunConfig:
    """A GPT of which parameters are most of what is held, and a full window of ``ACCUMULATION`` short micro-batches."""
    return replace(
        config,
        batch=replace(config.batch, global_size=world.size * ACCUMULATION * MICRO_SIZE, micro_size=MICRO_SIZE),
        data={**config.data, "seq_len": LENGTH},
        model={**config.model, **SHAPE, "seq_len": LENGTH},
    )


def memory(loop: WindowLoop, baseline: dict[int, int]) -> dict[str, int]:
    """Bytes on this rank. Gradients between windows, when the boundary is reached, and when they are stepped with."""
    moments: list[MemoryUse] = []

    def now() -> MemoryUse:
        return MemoryUse.of(loop.engine.unwrapped_model, loop.optimizer, baseline)

    def look() -> None:
        sleep(SETTLE_S)
        moments.append(now())

    between = now()
    loop(before_boundary=look, before_step=look)
    after = now()
    # What is there within a window and not between windows is gradients, wherever an engine keeps them.
    boundary, step = (moment.gradients + moment.other - between.other for moment in moments)
    boundary -= GENERATOR
    return {
        "parameters": after.parameters,
        "copies": after.copies,
        "optimizer": after.optimizer,
        "other": after.other,
        "gradients between windows": after.gradients,
        "gradients at the boundary": boundary,
        "gradients stepped with": step,
        "total": after.total,
    }


def traffic(loop: WindowLoop, ranks: int) -> Figures:
    """Calls and bytes of one window, by kind."""
    with CollectiveCounter() as counter:
        window = loop()
    assert len(window.micro_batches) == ACCUMULATION
    assert not set(counter.calls) - {*KINDS, "control"}, counter.calls
    return {
        "calls": dict(counter.calls),
        "payload": dict(counter.payload),
        "sent": {kind: ring_bytes(kind, counter.payload[kind], ranks) for kind in KINDS},
        "reductions": sum(counter.calls[kind] for kind in REDUCTIONS),
        "reduced": sum(counter.payload[kind] for kind in REDUCTIONS),
    }


def rehearse(variant: Variant, config: RunConfig, world: World) -> None:
    """Runs a window, so that what is imported and set up once is there before anything is measured."""
    WindowLoop(variant.components(config, world), world)()


def measure(variant: Variant, config: RunConfig, world: World) -> Figures:
    """The figures of one engine: each rank's bytes, and the traffic, which is the same on all of them."""
    rehearse(variant, replace(config, model={**config.model, "n_layer": 1, "n_head": 1, "n_embd": 8}), world)
    gc.collect()
    baseline, allocated_before = live_storages(), allocated(world.device)
    gc.freeze()  # nobody walks over what was there before
    components = variant.components(config, world)
    elements = sum(parameter.numel() for parameter in components.model.parameters())
    in_blocks = sum(p.numel() for p in components.model.get_submodule("blocks").parameters())
    loop = WindowLoop(components, world)
    del components
    for _ in range(WARM_UP):
        loop()
    gc.collect()
    found = memory(loop, baseline)
    found["allocated"] = allocated(world.device) - allocated_before
    sent = traffic(loop, world.size)
    gc.unfreeze()
    sharding = sharding_of(variant.engine)
    return {
        "version": variant.version,
        "memory": {key: world.all_gather_object(size) for key, size in found.items()},
        "memory theory": theory.memory(sharding, elements, world.size),
        "wire": sent,
        "wire theory": theory.sent(sharding, elements, in_blocks, ACCUMULATION, ranks=world.size),
    }


def compare(config: RunConfig, world: World) -> Figures:
    """The figures by engine; ``version`` is None where it is not installed."""
    config, found = sized(config, world), {}
    rehearse(next(iter(VARIANTS.values())), config, world)
    for name, variant in VARIANTS.items():
        found[name] = {"version": None} if variant.version is None else measure(variant, config, world)
    model = next(iter(VARIANTS.values())).components(config, world).model
    elements = sum(parameter.numel() for parameter in model.parameters())
    return {"ranks": world.size, "accumulation": ACCUMULATION, "parameters": elements, "engines": found}
