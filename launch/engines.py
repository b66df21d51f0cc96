"""What each engine holds on a rank and sends in a window, measured beside what it should be.

Memory: the tensors that the process holds, found by walking them all (``held.py``), at four moments of a window; and
what the C library (on a GPU: torch's allocator) has given out, from which nothing can hide. Traffic: the collectives
that torch dispatches, whoever calls them.

Theory: that of ``distaccum.forecast``. Memory is by the ZeRO paper's table 1, for fp32. Traffic is what has to be sent;
of DeepSpeed, whose stages may send otherwise, as the paper has it: a reduce-scatter and an all-gather (section 7.2), at
stage 3 with two gathers in a micro-step. Bytes on the wire are those that a rank sends where a collective goes around a
ring, the least that it can send. The payload is that of the whole tensor.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from importlib.util import find_spec
from time import sleep
from typing import Any, cast

from held import Held, alive, allocated

from distaccum.accumulation.step import run_window
from distaccum.config.engine import settings_of
from distaccum.config.schema import RunConfig
from distaccum.data.counter import GlobalCounter
from distaccum.data.factory import build_loader
from distaccum.data.window import Window
from distaccum.distributed.world import World
from distaccum.engines.base import Engine
from distaccum.engines.factory import create_engine
from distaccum.forecast import volume as theory
from distaccum.forecast.collectives import KINDS, ring_bytes
from distaccum.forecast.sharding import Sharding
from distaccum.losses.base import Loss
from distaccum.testing.counters import CollectiveCounter
from distaccum.train.components import TrainingComponents, components_from_config

ACCUMULATION, MICRO_SIZE, LENGTH = 4, 2, 32
SHAPE = {"n_layer": 6, "n_head": 4, "n_embd": 192}  # 2.7 million parameters, whose rows 2, 3 and 4 ranks share evenly
PARAMETERS = 4  # bytes an element
LET_GO = 0.02  # seconds: gloo's threads drop what they have sent a moment after it has arrived
WARM_UP = 2  # windows: the optimizer makes its state in the first
REDUCTIONS = KINDS[:3]
Figures = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Way:
    """An engine with its settings. ``needs``: a package."""

    engine: str
    options: dict[str, Any] = field(default_factory=dict)
    needs: str = ""

    @property
    def sharding(self) -> Sharding:
        """What the theory knows of it."""
        return Sharding.of(settings_of(self.engine)(**self.options))

    @property
    def version(self) -> str | None:
        """Of what it needs: empty where that is nothing, None where it is absent."""
        if not self.needs:
            return ""
        return version(self.needs) if find_spec(self.needs) is not None else None


WAYS = {
    "ddp": Way(engine="ddp"),
    "zero1": Way(engine="zero1"),
    "fsdp2, sync=boundary": Way(engine="fsdp2"),
    "fsdp2, sync=every": Way(engine="fsdp2", options={"sync": "every"}),
    **{
        f"deepspeed, stage={stage}": Way(engine="deepspeed", options={"stage": stage}, needs="deepspeed")
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


def nothing() -> None:
    """For moments at which nobody looks."""


class Rig:
    """One engine, and windows to run on it."""

    def __init__(self, way: Way, parts: TrainingComponents, world: World) -> None:
        config = parts.config
        self._loss, (self._optimizer,) = parts.loss, parts.optimizers
        self._engine: Engine = create_engine(
            parts.model,
            parts.optimizers,
            world,
            engine=settings_of(way.engine)(**way.options),
            precision=config.precision,
            clip_norm=config.optim.clip_norm,
            clip_value=config.optim.clip_value,
            global_batch_size=config.batch.global_size,
            micro_batch_size=config.batch.micro_size,
        )
        feed = build_loader(parts.data, parts.plan, world)
        self._windows = feed.windows(0, 0, GlobalCounter(world, parts.loss.count))

    def run(self, before_boundary: Callable[[], None] = nothing, before_step: Callable[[], None] = nothing) -> Window:
        """One window; ``before_boundary`` is called when all its micro-steps but the last are done, ``before_step``
        when the optimizer begins.
        """
        window, seen = next(self._windows), 0

        def loss(model: Any, batch: Any) -> Any:
            nonlocal seen
            seen += 1
            if seen == len(window.micro_batches):
                before_boundary()
            return self._loss(model, batch)

        hook = self._optimizer.register_step_pre_hook(lambda *_: before_step())
        try:
            assert run_window(self._engine, window, cast(Loss, loss)).applied
        finally:
            hook.remove()
        return window

    def held(self, baseline: dict[int, int]) -> Held:
        """Now."""
        return Held.of(self._engine.unwrapped_model, self._optimizer, baseline)


def memory(rig: Rig, baseline: dict[int, int]) -> dict[str, int]:
    """Bytes on this rank. Gradients between windows, when the boundary is reached, and when they are stepped with."""
    moments: list[Held] = []
    between = rig.held(baseline)

    def look() -> None:
        sleep(LET_GO)
        moments.append(rig.held(baseline))

    rig.run(before_boundary=look, before_step=look)
    after = rig.held(baseline)
    # What is there within a window and not between windows is gradients, wherever an engine keeps them.
    boundary, step = (moment.gradients + moment.other - between.other for moment in moments)
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


def traffic(rig: Rig, ranks: int) -> Figures:
    """Calls and bytes of one window, by kind."""
    with CollectiveCounter() as wire:
        window = rig.run()
    assert len(window.micro_batches) == ACCUMULATION
    assert not set(wire.calls) - {*KINDS, "control"}, wire.calls
    sent = {kind: ring_bytes(kind, wire.payload[kind], ranks) for kind in KINDS}
    return {
        "calls": dict(wire.calls),
        "payload": dict(wire.payload),
        "sent": sent,
        "reductions": sum(wire.calls[kind] for kind in REDUCTIONS),
        "reduced": sum(wire.payload[kind] for kind in REDUCTIONS),
    }


def rehearse(way: Way, config: RunConfig, world: World) -> None:
    """A window, so that what is imported and set up once is there already, and does not count."""
    Rig(way, components_from_config(config, world_size=world.size, device=world.device), world).run()


def measure(way: Way, config: RunConfig, world: World) -> Figures:
    """The figures of one engine: each rank's bytes, and the traffic, which is the same on all of them."""
    rehearse(way, replace(config, model={**config.model, "n_layer": 1, "n_head": 1, "n_embd": 8}), world)
    gc.collect()
    baseline, allocated_before = alive(), allocated(world.device)
    gc.freeze()  # nobody walks over what was there before
    parts = components_from_config(config, world_size=world.size, device=world.device)
    elements = sum(parameter.numel() for parameter in parts.model.parameters())
    in_blocks = sum(p.numel() for p in parts.model.get_submodule("blocks").parameters())
    rig = Rig(way, parts, world)
    del parts
    for _ in range(WARM_UP):
        rig.run()
    gc.collect()
    found = memory(rig, baseline)
    found["allocated"] = allocated(world.device) - allocated_before
    sent = traffic(rig, world.size)
    gc.unfreeze()
    return {
        "version": way.version,
        "memory": {key: world.all_gather_object(size) for key, size in found.items()},
        "memory theory": theory.held(way.sharding, elements, world.size),
        "wire": sent,
        "wire theory": theory.sent(way.sharding, elements, in_blocks, ACCUMULATION, ranks=world.size),
    }


def compare(config: RunConfig, world: World) -> Figures:
    """The figures by engine; ``version`` is None where it is not installed."""
    config, ways = sized(config, world), {}
    rehearse(next(iter(WAYS.values())), config, world)
    for name, way in WAYS.items():
        ways[name] = {"version": None} if way.version is None else measure(way, config, world)
    model = components_from_config(config, world_size=world.size, device=world.device).model
    elements = sum(parameter.numel() for parameter in model.parameters())
    return {"ranks": world.size, "accumulation": ACCUMULATION, "parameters": elements, "engines": ways}
