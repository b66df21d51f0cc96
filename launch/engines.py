"""What each engine holds on a rank and sends in a window, measured beside what it should be.

Memory: the tensors that the process holds, found by walking them all (``held.py``), at four moments of a window; and
what the C library (on a GPU: torch's allocator) has given out, from which nothing can hide. Traffic: the collectives
that torch dispatches, whoever calls them.

Theory of memory: S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020),
table 1, for fp32: of P parameters a rank holds 4P bytes, as much in gradients, and 8P in Adam's two moments; each over
N ranks from the stage on that shards it. Until the boundary gradients are whole where they are reduced once a window.
Theory of traffic: what has to be sent; of DeepSpeed, whose stages may send otherwise, as the paper has it: a
reduce-scatter and an all-gather (section 7.2), at stage 3 with two gathers in a micro-step.

Bytes on the wire are those that a rank sends where a collective goes around a ring, the least that it can send
(``distaccum.testing.counters.ring_bytes``): of a payload of B bytes 2(N-1)/N x B in an all-reduce, and (N-1)/N x B in a
reduce-scatter, an all-gather, or (on average over the ranks) a broadcast. The payload is that of the whole tensor.
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

from distaccum.build import Parts, build_parts, wrap
from distaccum.config import RunConfig
from distaccum.data.feeds import make_feed
from distaccum.data.tally import Tally
from distaccum.engine_config import settings_of
from distaccum.engines.base import Engine
from distaccum.loss import Loss
from distaccum.testing.counters import Wire, ring_bytes
from distaccum.window import Window, run_window
from distaccum.world import World

ACCUMULATION, MICRO_SIZE, LENGTH = 4, 2, 32
SHAPE = {"n_layer": 6, "n_head": 4, "n_embd": 192}  # 2.7 million parameters, whose rows 2, 3 and 4 ranks share evenly
PARAMETERS, MOMENTS = 4, 8  # bytes an element
OPTIMIZER_STAGE, GRADIENT_STAGE, PARAMETER_STAGE = 1, 2, 3  # of ZeRO, from which on it is sharded
LET_GO = 0.02  # seconds: gloo's threads drop what they have sent a moment after it has arrived
WARM_UP = 2  # windows: the optimizer makes its state in the first
KINDS = ("all-reduce", "reduce-scatter", "reduce", "all-gather", "broadcast")
REDUCTIONS = KINDS[:3]
Figures = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Way:
    """An engine with its settings. ``stage``: of ZeRO; ``needs``: a package; ``every``: reduces at each micro-step."""

    engine: str
    stage: int
    options: dict[str, Any] = field(default_factory=dict)
    needs: str = ""
    every: bool = False

    def sharded(self, stage: int, ranks: int) -> int:
        """By what a rank's part is smaller of what ZeRO shards from ``stage`` on."""
        return ranks if self.stage >= stage else 1

    @property
    def version(self) -> str | None:
        """Of what it needs: empty where that is nothing, None where it is absent."""
        if not self.needs:
            return ""
        return version(self.needs) if find_spec(self.needs) is not None else None


WAYS = {
    "ddp": Way(engine="ddp", stage=0),
    "zero1": Way(engine="zero1", stage=1),
    "fsdp2, sync=boundary": Way(engine="fsdp2", stage=3),
    "fsdp2, sync=every": Way(engine="fsdp2", stage=3, options={"sync": "every"}, every=True),
    **{
        f"deepspeed, stage={stage}": Way(engine="deepspeed", stage=stage, options={"stage": stage}, needs="deepspeed")
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

    def __init__(self, way: Way, parts: Parts, world: World) -> None:
        config = parts.config
        self._loss, (self._optimizer,) = parts.loss, parts.optimizers
        self._engine: Engine = wrap(
            parts.model, parts.optimizers, world, settings_of(way.engine)(**way.options), config.precision,
            clip_norm=config.optim.clip_norm, clip_value=config.optim.clip_value,
            global_size=config.batch.global_size, micro_size=config.batch.micro_size,
        )  # fmt: skip
        feed = make_feed(parts.source, parts.plan, world)
        self._windows = feed.windows(0, 0, Tally(world, parts.loss.count))

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
        return Held.of(self._engine.bare_model, self._optimizer, baseline)


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
    with Wire() as wire:
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
    Rig(way, build_parts(config, world_size=world.size, device=world.device), world).run()


def measure(way: Way, config: RunConfig, world: World) -> Figures:
    """The figures of one engine: each rank's bytes, and the traffic, which is the same on all of them."""
    rehearse(way, replace(config, model={**config.model, "n_layer": 1, "n_head": 1, "n_embd": 8}), world)
    gc.collect()
    baseline, allocated_before = alive(), allocated(world.device)
    gc.freeze()  # nobody walks over what was there before
    parts = build_parts(config, world_size=world.size, device=world.device)
    elements = sum(parameter.numel() for parameter in parts.model.parameters())
    whole_a_pass = gathered_elements(parts)
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
        "memory": {key: world.everyone(size) for key, size in found.items()},
        "memory theory": memory_theory(way, elements, world.size),
        "wire": sent,
        "wire theory": wire_theory(way, elements, whole_a_pass, world.size),
    }


def gathered_elements(parts: Parts) -> int:
    """What a micro-step gathers of a model in shards: its blocks twice, the rest once, as it is not freed between."""
    blocks = sum(p.numel() for p in parts.model.get_submodule("blocks").parameters())
    return sum(p.numel() for p in parts.model.parameters()) + blocks


def memory_theory(way: Way, elements: int, ranks: int) -> dict[str, float]:
    """By the ZeRO paper's table; whole gradients until the boundary, where there is one reduction a window."""
    weights, moments = PARAMETERS * elements, MOMENTS * elements
    return {
        "parameters": weights / way.sharded(PARAMETER_STAGE, ranks),
        "optimizer": moments / way.sharded(OPTIMIZER_STAGE, ranks),
        "gradients at the boundary": weights / (ranks if way.every else 1),
        "gradients stepped with": weights / way.sharded(GRADIENT_STAGE, ranks),
    }


def wire_theory(way: Way, elements: int, gathered: int, ranks: int) -> dict[str, float]:
    """Payloads of a window by kind, as bytes that a rank sends."""
    weights = PARAMETERS * elements
    if way.needs and way.stage in (OPTIMIZER_STAGE, GRADIENT_STAGE):
        payload = {"reduce-scatter": weights, "all-gather": weights}
    elif way.stage == PARAMETER_STAGE:
        times = ACCUMULATION if way.every else 1
        gathered = 2 * elements if way.needs else gathered
        payload = {"reduce-scatter": times * weights, "all-gather": ACCUMULATION * PARAMETERS * gathered}
    else:
        payload = {"all-reduce": weights, "broadcast": weights if way.stage else 0}
    return {kind: ring_bytes(kind, payload.get(kind, 0), ranks) for kind in KINDS}


def compare(config: RunConfig, world: World) -> Figures:
    """The figures by engine; ``version`` is None where it is not installed."""
    config, ways = sized(config, world), {}
    rehearse(next(iter(WAYS.values())), config, world)
    for name, way in WAYS.items():
        ways[name] = {"version": None} if way.version is None else measure(way, config, world)
    model = build_parts(config, world_size=world.size, device=world.device).model
    elements = sum(parameter.numel() for parameter in model.parameters())
    return {"ranks": world.size, "accumulation": ACCUMULATION, "parameters": elements, "engines": ways}
