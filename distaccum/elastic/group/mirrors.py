"""Who keeps a copy of whose share of a state, and to which state a view goes back; no torch, no store, no clock.

A checkpoint in memory consists of one share a rank. Each rank keeps its own, and that of one other rank. Members that
read the same reports come to the same checkpoint, and to the same holder of each share, without another message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from distaccum.elastic.group.views import Report, View


@dataclass(frozen=True, kw_only=True, order=True)
class Mark:
    """Which checkpoint in memory: the later one is greater.

    Args:
        window: the run's windows before it.
        generation: of the view that made it.
        step: the run's updates before it.
        ranks: of that view, each of which has made one share.
    """

    window: int
    generation: int
    step: int
    ranks: int


def keepers_of(members: Sequence[str]) -> tuple[int, ...]:
    """By rank the rank that keeps a copy of its share: a neighbour, and on another node as far as there are any.

    Args:
        members: of a view, ``node.local.life`` each, by rank.
    """
    nodes = [int(member.split(".")[0]) for member in members]
    order = sorted(range(len(members)), key=lambda rank: (nodes[rank], rank))
    away = max(map(nodes.count, nodes)) if len(set(nodes)) > 1 else 1
    keepers = [0] * len(order)
    for place, rank in enumerate(order):
        keepers[rank] = order[(place + away) % len(order)]
    return tuple(keepers)


def to_note(held: Mapping[Mark, Sequence[int]]) -> list[Any]:
    """What a member holds, for its report: by checkpoint the ranks whose shares it has."""
    return [asdict(mark) | {"shares": sorted(shares)} for mark, shares in held.items()]


def newest_whole(view: View, reports: Mapping[str, Report]) -> tuple[Mark, tuple[int, ...]] | None:
    """The newest checkpoint of which the view's members have every share; None where there is none.

    Returns:
        The checkpoint, and by share the first rank of the view that has it.
    """
    holders: dict[Mark, dict[int, int]] = {}
    for rank, member in enumerate(view.members):
        report = reports.get(member)
        for one in () if report is None else report.note.get("memory", ()):
            mark = Mark(**{key: value for key, value in one.items() if key != "shares"})
            for share in one["shares"]:
                holders.setdefault(mark, {}).setdefault(share, rank)
    whole = [mark for mark, found in holders.items() if found.keys() == set(range(mark.ranks))]
    if not whole:
        return None
    newest = max(whole)
    return newest, tuple(holders[newest][share] for share in range(newest.ranks))
