"""The micro-batch of a run with ``batch.micro_size=auto``: rehearsed, or taken up from the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from distaccum.accumulation.accumulator import Accumulator
from distaccum.accumulation.batch_norm import batch_statistics
from distaccum.accumulation.rehearsal import rehearse
from distaccum.accumulation.two_pass import of_micro_batch
from distaccum.data.host_memory import longest_micro_batch
from distaccum.data.plan.batch import Plan, largest_share
from distaccum.data.plan.stream import StreamPlan
from distaccum.distributed.environment import LaunchEnvironment
from distaccum.distributed.world import World
from distaccum.engines.base import Engine
from distaccum.errors import shorten
from distaccum.train.components import TrainingComponents, most_ahead

SIZE, REASON, HARDWARE, MARKS = "micro_size", "reason", "hardware", "marks"
_SO = "; so micro-batches have "


def find_micro_batch(
    components: TrainingComponents, accumulator: Accumulator, world: World, saved: Mapping[str, Any], hardware: str
) -> TrainingComponents:
    """The components with the micro-batch that the run is to use, and why; a collective before the first window.

    Args:
        components: planned with a size before the rehearsal.
        accumulator: made of them, with the weights to begin with.
        world: this rank.
        saved: what the checkpoint says of memory; the same on every rank.
        hardware: as :func:`hardware_of` says.

    Returns:
        The same components, but where ``batch.micro_size=auto``: with another plan.

    Raises:
        ResourceError: memory is over for a single sample.
    """
    plan, batch = components.plan, components.config.batch
    if not batch.rehearses:
        return components.found(memory={HARDWARE: hardware})
    if why := _not_to_be_found(plan, accumulator.engine):
        return components.found(memory={HARDWARE: hardware, REASON: f"micro {batch.first_micro_size}: {why}"})
    assert not plan.is_stream
    if saved.get(HARDWARE) == hardware and SIZE in saved:
        found = {name: saved[name] for name in saved if name != MARKS}
        found[REASON], _, _ = found[REASON].partition(_SO)
    else:
        most, rehearsed = largest_share(plan), of_micro_batch(components.loss)
        found = rehearse(
            accumulator.engine,
            world,
            rehearsed,
            partial(longest_micro_batch, components.data),
            count=rehearsed.count,
            most=min(most, batch.micro_size) if isinstance(batch.micro_size, int) else most,
            sharing=max(1, LaunchEnvironment.from_environment().local_size),
        ).as_dict()
    plan = plan.with_micro_batch(found[SIZE])
    if plan.limit_of_tokens:
        found[REASON] += f"{_SO}{plan.micro_batch_in_words}"
    return components.found(
        plan=plan,
        most_ahead=most_ahead(components.data, plan, components.config),
        memory={**found, HARDWARE: hardware},
    )


def _not_to_be_found(plan: Plan | StreamPlan, engine: Engine) -> str:
    """Why nothing is rehearsed, in words; empty where something is."""
    if plan.is_stream:
        return "a stream gives its items once, so that nothing is rehearsed"
    normalized = batch_statistics(engine.unwrapped_model)
    if normalized:
        return f"{shorten(normalized, 1)} takes statistics of a micro-batch, whose size is yours to state"
    return ""


def memory_to_save(components: TrainingComponents, accumulator: Accumulator) -> dict[str, Any]:
    """What a checkpoint keeps: the micro-batch with its reason, what it was found on, and which shapes fit."""
    return {**components.memory, MARKS: accumulator.engine.memory_marks.state_dict()}


def hardware_of(components: TrainingComponents, world: World) -> str:
    """What a measurement of memory and rate holds for; of all ranks' devices the first one's."""
    device = world.device
    name = f"{torch.get_num_threads()} threads of a CPU"
    if device.type == "cuda":
        name = f"{torch.cuda.get_device_name(device)}, {torch.cuda.mem_get_info(device)[1]} bytes"
    config = components.config
    how = f"{config.engine.name}, {config.precision.name}, compile={config.compile.name}"
    return world.broadcast_str(f"{world.size} x {name}; {how}")
