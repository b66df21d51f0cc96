"""Computing and communication at the same time: buckets, and one pass over a model's parts.

At the boundary the reduction goes bucket by bucket, while the backward still computes the rest::

    finish[i] = max(ready[i], finish[i-1]) + cost[i]

What is left of it when the backward has ended is exposed. Sharded parameters are gathered block by block over the same
link, each block while the one before it computes. DeepSpeed, as it is configured here, reduces after the backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

MIB = 2**20


def buckets(tensors: Sequence[int], cap: float, first: float | None = None, *, itemsize: int = 4) -> tuple[int, ...]:
    """Elements of each bucket that DDP fills with gradients, from the model's last parameter to its first.

    Args:
        tensors: elements of each parameter, in the model's order.
        cap: MiB from which on a bucket is full.
        first: MiB of the first bucket; None: as the others. DDP's is 1 where no cap is given.
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
    """``whole`` seconds, divided among the units by their size."""
    total = sum(units)
    return [whole * unit / total for unit in units]


def run_pass(
    compute: Iterable[float], gathers: Sequence[float], reductions: Sequence[float], *, link_free: float = 0.0
) -> tuple[float, float]:
    """The times when a forward or backward over units has computed all of them, and when the link is free again.

    Args:
        compute: seconds of each unit.
        gathers: seconds of gathering each unit's parameters, 0 for none; a gather starts when the unit before begins.
        reductions: seconds of reducing each unit's gradient, 0 for none; a reduction starts when the unit has ended.
        link_free: the time from which on the link is free.
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
