"""A look at some samples before windows are run that are cut because of what an earlier process has found too large."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from distaccum.accumulation.recovery import Recovery
from distaccum.data.cutting import CannotCutError, cut, rows_of
from distaccum.data.window import Window
from distaccum.distributed.world import World
from distaccum.engines.base import Engine
from distaccum.errors import ResourceError
from distaccum.losses.base import Loss
from distaccum.verification.parts import look_at_rows

_PAIR = 2


def check_cut(engine: Engine, window: Window, loss: Loss, world: World) -> None:
    """Looks at the first samples of a micro-batch, in the first windows; a collective where a forward is one.

    Where some rank has no sample in the window, that waits for the next one.

    Raises:
        ResourceError: parts of a micro-batch do not give what the whole does; on all ranks where a forward is a
            collective.
    """
    recovery, together = Recovery.of(engine), engine.forward_communicates
    if not recovery.looks:
        return
    found = _largest(window)
    rows = 0 if found is None else found[1]
    if together:  # as many forwards on every rank
        rows = -world.all_reduce_max_host([-rows])[0]
    if found is None or rows < (1 if together else _PAIR):
        return
    batch, own = found
    anywhere = world.all_reduce_max_host if together else list
    looked = look_at_rows(engine, loss, lambda start, stop: cut(batch, start, stop, own), rows, anywhere=anywhere)
    why = looked.again or looked.differs or ("its forward changes buffers" if looked.changes else "")
    said = world.all_gather_names([why] if why else []) if together else [why] if why else []
    if said:
        raise ResourceError(
            f"micro-batches of {', '.join(map(str, engine.memory_marks.failed))} have run out of memory before, and "
            f"parts of them would give another gradient: {said[0]}. Lower batch.micro_size"
        )
    if rows > 1:
        recovery.note(looked)


def _largest(window: Window) -> tuple[Any, int] | None:
    """The micro-batch of most rows that can be cut, and how many these are."""
    found = None
    for i, micro in enumerate(window.micro_batches):
        with suppress(CannotCutError):
            rows = rows_of(window, i)
            if found is None or rows > found[1]:
                found = micro.batch, rows
    return found
