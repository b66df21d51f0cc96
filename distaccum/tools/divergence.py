"""Which ranks differ in what should be the same on all of them, and in which tensors."""

from __future__ import annotations

from collections.abc import Mapping

from distaccum.errors import shorten


def who_differs(everyone: Mapping[int, Mapping[str, int]], when: str, saved: object, *, of_state: bool = False) -> str:
    """The message of a comparison of replicas, some of which differ.

    Args:
        everyone: by rank: by name, the sum of a tensor's bits.
        when: they were compared.
        saved: the last checkpoint that was compared before it was saved; None: there is none.
        of_state: whether the tensors are the optimizers', and not weights.
    """
    known = list(dict.fromkeys(name for each in everyone.values() for name in each))
    names = [name for name in known if len({each.get(name) for each in everyone.values()}) > 1]
    groups: dict[tuple[int | None, ...], list[int]] = {}
    for rank, each in everyone.items():
        groups.setdefault(tuple(each.get(name) for name in names), []).append(rank)
    size = max(map(len, groups.values()))
    most = next(ranks for ranks in groups.values() if len(ranks) == size)
    odd = [rank for rank in everyone if rank not in most]
    if 2 * size > len(everyone):
        who = f"{'rank' if len(odd) == 1 else 'ranks'} {shorten(odd)} {'differs' if len(odd) == 1 else 'differ'}"
        who += " from the other ranks" if len(odd) < len(everyone) - 1 or size > 1 else f" from rank {most[0]}"
    else:
        who = "ranks differ: " + " against ".join(shorten(ranks) for ranks in groups.values())
    what = "the optimizers' state is no longer" if of_state else "the weights are no longer"
    where = shorten(names) if names else "what has changed since"
    last = "the last checkpoint" if saved is None else f"{saved}, the last checkpoint"
    own = " an optimizer that keeps what it computes from its own shard," if of_state else ""
    return (
        f"{what} the same on every rank {when}: {who}, in {where} "
        f"({len(names)} of {len(known)} tensors). Something changed them past the engine on some ranks only: an "
        f"in-place edit, a step or an EMA on one rank, other data in a load,{own} or a defect of the hardware. "
        f"Resume from {last}; trainer.on_divergence=warn goes on"
    )
