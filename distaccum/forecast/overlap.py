"""What computes and what is sent at the same time: buckets, and one pass over a model's parts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

MIB = 2**20


def buckets(tensors: Sequence[int], cap: float, first: float | None = None, *, itemsize: int = 4) -> tuple[int, ...]:
    """How DDP fills its buckets with gradients, from the model's last to its first: elements of each.

    Args:
        tensors: elements of each parameter, in the model's order.
        cap: MiB from which on a bucket is full.
        first: MiB of the first one; None: as the others. DDP's is 1 where it is not told a cap.
        itemsize: bytes an element.
    """
    found: list[int] = []
    held = 0
    for elements in reversed(tensors):
        held += elements
        limit = cap if found or first is None else first
        if held * itemsize >= limit * MIB:
            found.append(held)
            held = 0
    return (*found, held) if held else tuple(found)


def shares(units: Sequence[int], whole: float) -> list[float]:
    """``whole`` seconds over the units, by their size."""
    total = sum(units)
    return [whole * unit / total for unit in units]


def run_pass(
    compute: Iterable[float], gathers: Sequence[float], reductions: Sequence[float], *, link_free: float = 0.0
) -> tuple[float, float]:
    """One pass, forward or backward, over units in turn: when it has computed all, and when the link is free again.

    Args:
        compute: seconds of each unit.
        gathers: seconds until its parameters are there, 0 for none; asked for when the unit before it begins.
        reductions: seconds of reducing its gradient, 0 for none; asked for when it has ended.
        link_free: when the link is.
    """
    now, link = 0.0, link_free
    there = link = link + gathers[0] if gathers[0] else link
    for i, (busy, reduction) in enumerate(zip(compute, reductions, strict=True)):
        begins = max(now, there) if gathers[i] else now
        if i + 1 < len(gathers) and gathers[i + 1]:
            there = link = max(link, begins) + gathers[i + 1]
        now = begins + busy
        if reduction:
            link = max(link, now) + reduction
    return now, link
