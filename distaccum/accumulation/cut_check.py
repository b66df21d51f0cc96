"""A look at two samples before windows are run that are cut because of what an earlier process has found too large."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from distaccum.accumulation.recovery import Recovery
from distaccum.data.cutting import CannotCutError, cut, rows_of
from distaccum.data.window import Window
from distaccum.distributed.world import World
from distaccum.engines.base import Engine
from distaccum.errors import ResourceError
from distaccum.losses.base import Loss
from distaccum.verification.parts import look_at_parts

_PAIR = 2


def check_cut(engine: Engine, window: Window, loss: Loss, world: World) -> None:
    """Looks at two samples, once; a collective where a forward is one.

    Where some rank has no sample in the window, that waits for the next one.

    Raises:
        ResourceError: parts of a micro-batch do not give what the whole does; on all ranks where a forward is a
            collective.
    """
    recovery, together = Recovery.of(engine), engine.forward_communicates
    if recovery.parts is not None:
        return
    samples = next(_samples(window), [])
    if together and world.all_reduce_host([not samples])[0]:
        return
    if len(samples) < _PAIR and not together:
        return
    whole, *parts = samples if len(samples) > 1 else samples * (_PAIR + 1)
    found = look_at_parts(engine, loss, whole, parts)
    enough = len(samples) > 1
    why = found.again or (found.differs or ("its forward changes buffers" if found.changes else "") if enough else "")
    said = world.all_gather_names([why] if why else []) if together else [why] if why else []
    if said:
        raise ResourceError(
            f"micro-batches of {', '.join(map(str, engine.memory_marks.failed))} have run out of memory before, and "
            f"parts of them would give another gradient: {said[0]}. Lower batch.micro_size"
        )
    if enough or together:
        recovery.parts = found


def _samples(window: Window) -> Iterator[list[Any]]:
    """Of each micro-batch two samples together, and the two apart; of one with a single sample that alone."""
    alone: list[Any] = []
    for i, micro in enumerate(window.micro_batches):
        try:
            rows = rows_of(window, i)
        except CannotCutError:
            continue
        if rows >= _PAIR:
            yield [cut(micro.batch, start, stop, rows) for start, stop in ((0, 2), (0, 1), (1, 2))]
        alone = alone or [micro.batch]
    if alone:
        yield alone
