"""The micro-batch of a run: rehearsed, or taken up from the checkpoint; and which ones memory has run out with."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from distaccum.accumulation.accumulator import Accumulator
from distaccum.accumulation.batch_norm import batch_statistics
from distaccum.accumulation.two_pass import of_micro_batch
from distaccum.checkpoint.files import ABSENT, write_json
from distaccum.data.cutting import Shape
from distaccum.data.plan.batch import Plan, largest_share
from distaccum.data.plan.stream import StreamPlan
from distaccum.distributed.memory import is_out_of_memory, out_of_memory
from distaccum.distributed.world import World
from distaccum.engines.base import Engine
from distaccum.engines.memory_marks import MemoryMarks
from distaccum.errors import ResourceError, shorten
from distaccum.program import LONGEST, REHEARSAL, load
from distaccum.train.checks import most_ahead
from distaccum.train.components import TrainingComponents
from distaccum.train.failure import RUN_NOTE, reason_of
from distaccum.train.run_dir import RunDir

SIZE, REASON, HARDWARE, MARKS = "micro_size", "reason", "hardware", "marks"
_SO = "; so micro-batches have "


def find_micro_batch(
    components: TrainingComponents, accumulator: Accumulator, saved: Mapping[str, Any], hardware: str
) -> TrainingComponents:
    """The components with the micro-batch that the run is to use, and why; a collective before the first window.

    Args:
        components: planned with a size before the rehearsal.
        accumulator: made of them, with the weights to begin with.
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
        found = load(REHEARSAL)(
            accumulator.engine,
            rehearsed,
            partial(load(LONGEST), components.data),
            most=min(most, batch.micro_size) if isinstance(batch.micro_size, int) else most,
        ).as_dict()
    plan = plan.with_micro_batch(found[SIZE])
    if plan.limit_of_tokens:
        found[REASON] += f"{_SO}{plan.micro_batch_in_words}"
    return components.found(
        plan=plan, most_ahead=most_ahead(components.data, plan, components.config), memory={**found, HARDWARE: hardware}
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
    if device.type != "cpu":
        own = torch.get_device_module(device)
        name = f"{own.get_device_name(device)}, {own.mem_get_info(device)[1]} bytes"
    config = components.config
    how = f"{config.engine.name}, {config.precision.name}, compile={config.compile.name}"
    return world.broadcast_str(f"{world.size} x {name}; {how}")


_log = logging.getLogger(__name__)
NAME = "memory.json"
_FAILED, _REASON = "failed", "reason"


@contextmanager
def memory_noted(
    run_dir: RunDir, marks: MemoryMarks, saved: Mapping[str, Any], hardware: str, world: World, *, resume: str
) -> Iterator[None]:
    """Within the block marks are known, and this rank notes a shape that it runs out of memory with; a collective.

    Args:
        run_dir: of the run; may hold a note of the start before.
        marks: of the engine, before its first micro-step.
        saved: what the checkpoint says of memory; the same on every rank.
        hardware: that marks hold for.
        world: this rank.
        resume: as the run was told. From a checkpoint elsewhere it goes on by itself once it has saved one of its own.
    """
    if saved.get(HARDWARE) == hardware:
        marks.load_state_dict(saved.get(MARKS, {}))
    for shape in _read_by_all(run_dir, hardware, world):
        marks.fail(shape)
    before = set(marks.failed)
    try:
        yield
    except Exception as error:
        over = is_out_of_memory(error) or isinstance(error, ResourceError)
        if over and set(marks.failed) - before and not run_dir.is_foreign():
            with suppress(OSError):
                meant = out_of_memory(error, world) if is_out_of_memory(error) else error
                _write(run_dir, marks.failed, hardware, reason=reason_of(world.rank, meant))
                if resume in ("never", "auto") or run_dir.saved_step() is not None:
                    _tell_launcher(marks.failed)
        raise


def _read_by_all(run_dir: RunDir, hardware: str, world: World) -> list[Shape]:
    found = _read(run_dir.path) if world.is_main else {}
    shapes = found.get(_FAILED, []) if found.get(HARDWARE) == hardware else []
    if found.get(_REASON):
        _write(run_dir, shapes, hardware)  # of this start, which has not failed
    return [Shape(*shape) for shape in json.loads(world.broadcast_str(json.dumps(shapes)))]


def _write(run_dir: RunDir, shapes: Sequence[Sequence[int]], hardware: str, reason: str = "") -> None:
    note = {HARDWARE: hardware, _FAILED: list(map(list, shapes)), _REASON: run_dir.hidden(reason)}
    write_json(run_dir.path / NAME, note)


def _tell_launcher(shapes: Sequence[Shape]) -> None:
    if RUN_NOTE in os.environ:
        noted_for_launcher(Path(os.environ[RUN_NOTE])).write_text(", ".join(map(str, shapes)))


def noted_for_launcher(run_note: Path) -> Path:
    """The file that says which micro-batches are cut if the launcher starts the run again."""
    return run_note.with_name("memory")


def ended_by_memory(folder: Path) -> bool:
    """Whether the last start in the run directory has left a note: the next one does not do the same."""
    return bool(_read(folder).get(_REASON))


def _read(folder: Path) -> Mapping[str, Any]:
    try:
        found = json.loads((folder / NAME).read_bytes())
        for rows, elements in found[_FAILED]:
            Shape(int(rows), int(elements))
    except ABSENT:
        return {}
    except (OSError, ValueError, TypeError, LookupError) as error:
        _log.warning("%s is passed over, so that nothing is cut because of it: %s", folder / NAME, error)
        return {}
    read: Mapping[str, Any] = found
    return read
