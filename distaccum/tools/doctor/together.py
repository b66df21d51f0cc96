"""What the ranks do together: who they are, their clocks, the folder that they share, and an all-reduce.

Rank 0 asks, the others take part; each wait has an end on both sides, so that a rank that is gone costs its limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distaccum.tools.doctor.agreement import About, agreement, listed, nodes
from distaccum.tools.doctor.collective import judge_rate
from distaccum.tools.doctor.facts import Look
from distaccum.tools.doctor.here import ALL_S, call, quietly
from distaccum.tools.doctor.limits import Probe, look
from distaccum.tools.doctor.meeting import MEET_S, Meeting, answer_pings, clocks, gather
from distaccum.tools.doctor.network import GLOO, NCCL

_REDUCE_S, _FILE_S, _SEEN_S = 90.0, 10.0, 1.0
_MARKED, _REDUCE = "marked", "reduce"


def take_part(meeting: Meeting, name: str, folder: Path) -> None:
    """On the ranks but 0; ``name`` is the same on all of them, and new."""
    answer_pings(meeting)
    if meeting.take(_MARKED, MEET_S):
        seen = call("disk", "sees_mark", folder, name, _SEEN_S)
        gather(meeting, "seen", look(Probe(name="seen", act=seen, limit_s=_FILE_S)).to_json(), 0)
    if meeting.take(_REDUCE, MEET_S):
        gather(meeting, "reduced", _reduced(meeting, name).to_json(), 0)


def ask(meeting: Meeting, name: str, folder: Path, ranks: list[About], networks: Mapping[str, Look | None]) -> Look:
    """On rank 0.

    Args:
        meeting: of all ranks.
        name: as in :func:`take_part`.
        folder: where runs will go.
        ranks: what they say of themselves.
        networks: each node's interfaces, by its name.
    """
    found = agreement(ranks)
    places = nodes(ranks)
    others = {members[0]: place for place, members in places.items() if members[0]}
    _join(found, clocks(meeting, others or {1: next(iter(places))}))
    _join(found, _shared(meeting, name, folder))
    meeting.give(_REDUCE, 1)
    reduced = _reduced(meeting, name)
    answers = gather(meeting, "reduced", reduced.to_json(), _REDUCE_S)
    backend = reduced.value("backend")
    if backend is None:
        _not_connected(reduced, answers)
    choice = NCCL if backend == "nccl" else GLOO
    links = {place: one.value(choice) if one is not None else None for place, one in networks.items()}
    judge_rate(reduced, links, nodes=len(places))
    _join(found, reduced)
    return found


def absent(everyone: Mapping[int, Any]) -> Look:
    """Of the ranks that have met and told nothing."""
    found = Look()
    silent = [rank for rank, one in everyone.items() if one is None]
    if silent:
        found.find(f"{listed(silent)} came, and told nothing within {ALL_S:.0f} s", "look at what they print")
    return found


def _reduced(meeting: Meeting, name: str) -> Look:
    act = call("collective", "all_reduce", meeting.ranks, name)
    return look(Probe(name="all-reduce", act=act, limit_s=_REDUCE_S))


def _not_connected(reduced: Look, answers: Mapping[int, Any]) -> None:
    """What the ranks say where there was no all-reduce; each thing once."""
    said: dict[str, list[int]] = {}
    for rank, one in answers.items():
        texts = [fact.text for fact in Look.from_json(one).facts] if one is not None else ["no answer"]
        said.setdefault(texts[0] if texts else "nothing", []).append(rank)
    reduced.facts.clear()
    for text, where in said.items():
        reduced.tell(f"all-reduce, {listed(where)}", text)
    mend = "export GLOO_SOCKET_IFNAME=INTERFACE NCCL_SOCKET_IFNAME=INTERFACE    # one that all nodes reach; see Network"
    if refused := next((text for text in said if "ConfigError: " in text), ""):  # which says what to do
        mend = refused.partition("ConfigError: ")[2].partition(". ")[2] or mend
    reduced.find("the ranks do not connect: there was no all-reduce", mend)


def _shared(meeting: Meeting, name: str, folder: Path) -> Look:
    """Whether the others see a file that this rank makes."""
    found, mark, row = Look(), name, "shared folder"
    made = look(Probe(name=row, act=call("disk", "shared_mark", folder, mark), limit_s=_FILE_S))
    if made.facts:  # why there is no file
        meeting.give(_MARKED, 0)
        return made
    try:
        meeting.give(_MARKED, 1)
        answers = gather(meeting, "seen", Look().to_json(), _FILE_S + _SEEN_S)
    finally:
        quietly(call("disk", "remove_mark", folder, mark))
    took = {
        rank: Look.from_json(one).value("seen") if one is not None else None for rank, one in answers.items() if rank
    }
    times = {rank: one for rank, one in took.items() if isinstance(one, float) and one >= 0}
    blind = [rank for rank in took if rank not in times]
    if not blind:
        latest = max(times.values())
        found.tell(row, f"every rank sees rank 0's file in {folder}, the last after {latest:.2f} s", latest)
        return found
    found.tell(row, f"{listed(blind)} did not see rank 0's file in {folder} within {_SEEN_S:.0f} s", blind)
    what = f"{listed(blind)} cannot see what rank 0 writes in {folder}, and every rank writes a part of a checkpoint"
    found.find(what, "distaccum doctor --folder /scratch/$USER/runs    # one that all nodes share; then hydra.run.dir")
    return found


def _join(one: Look, other: Look) -> None:
    one.facts += other.facts
    one.findings += other.findings
