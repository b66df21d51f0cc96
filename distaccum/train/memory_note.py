"""Which micro-batches a run has run out of memory with: ``memory.json``, which the next start in its folder reads.

Where a forward is a collective (fsdp2, ZeRO-3) nothing can be mended in its middle: all ranks leave, and begin again at
the checkpoint. Every rank then cuts such micro-batches into the same parts before it runs them.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from distaccum.checkpoint.files import ABSENT, write_json
from distaccum.distributed.memory import is_out_of_memory, out_of_memory
from distaccum.distributed.world import World
from distaccum.engines.memory_marks import MemoryMarks, Shape
from distaccum.errors import ResourceError
from distaccum.train.failure import RUN_NOTE, reason_of
from distaccum.train.micro_batch import HARDWARE, MARKS
from distaccum.train.run_dir import RunDir

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
