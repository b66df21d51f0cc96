"""Who computes what after a member of a run is gone or has come: views, reports, and the rules between them.

Pure functions of what the store holds; no torch, no store, no clock. Members that read the same view and the same
reports come to the same source, the same members behind it and the same shares, without another message.

A view is a generation of the run's members. Whoever leaves its group reports how far it is, and the next view is made
of those who have reported. A node covers the blocks of a window from its begin to before its end.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

Node = tuple[int, int]

NEWCOMER = -1
"""The position of a member that has no state yet."""


@dataclass(frozen=True, kw_only=True)
class View:
    """The members of one generation; a member's rank is its place in them."""

    generation: int
    members: tuple[str, ...]

    def rank_of(self, member: str) -> int | None:
        """The member's rank, or None if it does not belong to the view."""
        return self.members.index(member) if member in self.members else None

    def to_json(self) -> str:
        """The view as the store holds it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> View:
        """The view that the store holds."""
        found = json.loads(text)
        return cls(generation=int(found["generation"]), members=tuple(map(str, found["members"])))


@dataclass(frozen=True, kw_only=True)
class Report:
    """How far a member was when it left its group.

    Args:
        member: who reports.
        position: grows with each window that it has stepped, and with what it does after that; or ``NEWCOMER``.
        held: the nodes of the window after its position whose sums it has.
        note: what else its readers want; the protocol does not read it.
    """

    member: str
    position: int
    held: tuple[Node, ...] = ()
    note: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def to_json(self) -> str:
        """The report as the store holds it."""
        return json.dumps(
            {"member": self.member, "position": self.position, "held": self.held, "note": dict(self.note)}
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> Report:
        """The report that the store holds; keys of other writers are left out."""
        found = json.loads(text)
        return cls(
            member=str(found["member"]),
            position=int(found["position"]),
            held=tuple((int(begin), int(end)) for begin, end in found.get("held", ())),
            note=found.get("note", {}),
        )


def propose(
    view: View,
    reports: Mapping[str, Report],
    candidates: Sequence[str],
    gone: Collection[str],
    *,
    expels: bool,
    least: int,
) -> View | None:
    """The view after ``view``, or None while there is something to wait for.

    Its members are those who have reported, in the order of ``view``, and then the candidates. There is none with fewer
    than ``least`` members, and none without a member that has a state: candidates alone have nothing to go on from.

    Args:
        view: the view that its members leave.
        reports: what its members have reported since.
        candidates: who waits to join, in the order they came. Who was in any view before waits no more.
        gone: who has ended, or is said to have.
        expels: whether the proposer has waited long enough for members that are silent.
        least: the fewest members that go on.
    """
    here = [member for member in view.members if member not in gone]
    staying = [member for member in here if member in reports]
    if len(staying) < len(here) and not expels:
        return None
    joining = [member for member in candidates if member not in gone and member not in view.members]
    members = tuple(dict.fromkeys(staying + joining))
    if len(members) < least or all(reports[member].position == NEWCOMER for member in staying):
        return None
    return View(generation=view.generation + 1, members=members)


def source_of(view: View, reports: Mapping[str, Report]) -> str:
    """The member whose state all go on from: the furthest, and of several the first."""
    return max(view.members, key=lambda member: _position(member, reports))


def behind(view: View, reports: Mapping[str, Report]) -> tuple[str, ...]:
    """The members that take the source's state, by rank."""
    furthest = _position(source_of(view, reports), reports)
    return tuple(member for member in view.members if _position(member, reports) < furthest)


@dataclass(frozen=True, kw_only=True)
class Share:
    """A rank's part of the window after the source's position.

    Args:
        held: the nodes whose sums it has already and which count.
        blocks: the blocks it computes, ascending.
    """

    held: tuple[Node, ...]
    blocks: tuple[int, ...]


def shares_of(view: View, reports: Mapping[str, Report], blocks: int) -> tuple[Share, ...]:
    """Every rank's share of a window of ``blocks`` blocks: each block is in one share, once.

    What a member holds counts if it is at the source's position, for else it belongs to another window, and if nobody
    before it holds any of the same blocks. What nobody holds is dealt in ascending runs whose lengths differ by one at
    most. Without reports, as in a view's later windows, nobody holds anything.
    """
    furthest = _position(source_of(view, reports), reports)
    covered: set[int] = set()
    held: list[tuple[Node, ...]] = []
    for member in view.members:
        counted: list[Node] = []
        report = reports.get(member)
        for begin, end in report.held if report is not None and report.position == furthest else ():
            node = range(begin, end)
            if 0 <= begin < end <= blocks and covered.isdisjoint(node):
                covered.update(node)
                counted.append((begin, end))
        held.append(tuple(counted))
    left = [block for block in range(blocks) if block not in covered]
    count, size = len(left), len(view.members)
    return tuple(
        Share(held=nodes, blocks=tuple(left[count * rank // size : count * (rank + 1) // size]))
        for rank, nodes in enumerate(held)
    )


def _position(member: str, reports: Mapping[str, Report]) -> int:
    """A member that joins has not reported."""
    return reports[member].position if member in reports else NEWCOMER
