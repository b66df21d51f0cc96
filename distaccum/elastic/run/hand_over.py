"""The state that the members of a view go on from: agreed on by their reports, and sent to those who lack it.

Ranks that were in a view carry it over themselves. Who is behind, and who is new, takes the state of the one that is
furthest, over the new group; its digest travels with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from distaccum.distributed.world import World
from distaccum.elastic.engine.message import digest_of, from_message, to_message
from distaccum.elastic.engine.shares import Share, Shares
from distaccum.elastic.engine.tree import PartialWindow
from distaccum.elastic.engine.window import Again, SecondAssignment
from distaccum.elastic.group.views import Report, View, shares_of, source_of
from distaccum.elastic.run.carried import AVERAGE, NO_STATE, NOT_BEGUN, PER_WINDOW, TORN, Carried
from distaccum.engines.base import EngineState
from distaccum.errors import PeerError


@dataclass
class Begin:
    """How a view begins: with what state, and which window is open.

    Nothing else holds the state, a copy of all weights, so that it goes with :meth:`release`.
    """

    carried: Carried | None = None
    again: Again | None = None
    kept: PartialWindow = field(default_factory=PartialWindow)

    def release(self) -> None:
        """The run has it, and carries it on by itself."""
        self.carried, self.kept = None, PartialWindow()

    def report(self, member: str) -> Report:
        """What the other members are told."""
        return Report(member=member, position=NOT_BEGUN) if self.carried is None else self.carried.report(member)


def hand_over(view: View, reports: Mapping[str, Report], member: str, carried: Carried | None, world: World) -> Begin:
    """The state that all members go on from; a collective of a view's new group.

    Raises:
        PeerError: what came is not what was sent.
    """
    source = view.members.index(source_of(view, reports))
    furthest = reports[view.members[source]].position
    if furthest <= NOT_BEGUN:
        return Begin()
    own = carried if world.rank == source else None
    shares = None if own is None or own.shares is None else Shares(now=Share())
    plain = None if own is None else replace(own, engine=NO_STATE, shares=shares, average=None, random=None, begun=None)
    averages = reports[view.members[source]].note.get(AVERAGE, False)  # each callback has a part in it
    lacks = [
        name
        for name in view.members
        if _lacks(reports[name].position, furthest) or (averages and reports[name].position < furthest)
    ]
    content = _packed(own) if own is not None and lacks else torch.empty(0, dtype=torch.uint8)
    box: list[Any] = [(plain, len(content), digest_of(content))]
    _broadcast_object(box, source)
    told, size, digest = box[0]
    if told.shares is not None and any(reports[name].position == NOT_BEGUN for name in view.members):
        return Begin()  # somebody of the first view has no share yet, so that no window was stepped
    came: tuple[EngineState, Mapping[str, Tensor] | None] | None = None
    if lacks:
        if own is None:
            content = torch.empty(size, dtype=torch.uint8)
        torch.distributed.broadcast(content, src=source)
        if member in lacks:
            if digest_of(content) != digest:
                raise PeerError(f"the state that {view.members[source]} sent has come damaged", "while this one joined")
            came = _unpacked(content)
    shares = _shares(carried, view, reports, member) if told.shares is not None else None
    if came is not None:
        engine, average = came
        carried = replace(told, engine=engine, shares=shares, average=average)
    else:
        assert carried is not None
        carried = replace(
            told,
            engine=carried.engine,
            shares=shares,
            average=carried.average,
            random=carried.random,
            begun=carried.begun,
            stop=told.stop or carried.stop,
            stopping=told.stopping or carried.stopping,
        )
    again = _again(view, reports)
    if again is not None:  # the furthest one may not have counted it
        carried = replace(carried, counted=tuple(again.counts))
    kept = PartialWindow()
    if again is not None and carried.begun is not None and again.assignment.held_by(world.rank):
        kept = carried.begun.kept
    return Begin(carried, again, kept)


def _shares(carried: Carried | None, view: View, reports: Mapping[str, Report], member: str) -> Shares:
    """What this member has of the state that all go on from: that of after the step, if anybody has made it."""
    furthest = reports[source_of(view, reports)].position // PER_WINDOW
    there = [reports[name] for name in view.members if reports[name].position // PER_WINDOW == furthest]
    torn = any(report.note.get(TORN, False) for report in there)
    if carried is None or carried.shares is None:
        return Shares(now=Share(), torn=torn)
    own = carried.shares.now if reports[member].position // PER_WINDOW == furthest else carried.shares.ahead
    return Shares(now=own or Share(), torn=torn)


def _lacks(position: int, furthest: int) -> bool:
    """Whether a member there has not the weights of the furthest one."""
    return position <= NOT_BEGUN or position // PER_WINDOW < furthest // PER_WINDOW


def _again(view: View, reports: Mapping[str, Report]) -> Again | None:
    """The window that goes on, if a member that is not behind holds a part of it."""
    source = reports[source_of(view, reports)]
    notes = [r.note for r in reports.values() if r.position == source.position and r.held and r.member in view.members]
    if not notes:
        return None
    note = notes[0]
    shares = shares_of(view, reports, note["blocks"])
    held, computed = tuple(share.held for share in shares), tuple(share.blocks for share in shares)
    assignment = SecondAssignment(note["units"], note["blocks"], len(view.members), held, computed)
    return Again(epoch=note["epoch"], window=note["window"], assignment=assignment, counts=note["counts"])


def _packed(carried: Carried) -> Tensor:
    state, average = carried.engine, carried.average
    words = {
        "model": list(state.model),
        "optimizer": list(state.optimizer),
        "average": None if average is None else list(average),
        "values": dict(state.optimizer_values),
        "scaler": dict(state.scaler),
    }
    tensors = [*state.model.values(), *state.optimizer.values(), *(average or {}).values()]
    return to_message(json.dumps(words).encode(), tensors)


def _unpacked(content: Tensor) -> tuple[EngineState, Mapping[str, Tensor] | None]:
    """The engine's state and the average, if there is one."""
    words, tensors = from_message(content)
    told, left = json.loads(words), iter(tensors)
    model, optimizer, average = (
        dict(zip(told[kind] or (), left, strict=False)) for kind in ("model", "optimizer", "average")
    )
    state = EngineState(model=model, optimizer=optimizer, optimizer_values=told["values"], scaler=told["scaler"])
    return state, None if told["average"] is None else average


def _broadcast_object(box: list[Any], source: int) -> None:
    torch.distributed.broadcast_object_list(box, src=source, device=torch.device("cpu"))
