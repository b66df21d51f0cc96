"""A search through what can be left of zero1's shares where ranks are lost, at every moment of a view.

What a member goes on from is chosen by the code of ``distaccum/elastic/run/hand_over.py`` itself; around it the model
has views, deaths and how far each member has come. A share's only value is the window that it is of. A member of a view
has come to one of these places:

0. It has not got its part of the state.
1. It has, and the window is not reduced here.
2. It has stepped its parameters, and sent their state to its successor.
3. It has its predecessor's as well, and has sent its weights.
4. It has everybody's weights: the window is made.

A member comes to 2 once all are at 1, to 3 once its predecessor is at 2, and to 4 once all are at 3. Within these
rules each may be anywhere when somebody dies, those who die as well. All who are left meet in the next view, with a
newcomer or without.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, product

from distaccum.accumulation.progress import Progress
from distaccum.checkpoint.state import RunState
from distaccum.elastic.engine.shares import Share, Shares
from distaccum.elastic.group.views import NEWCOMER, Report, View
from distaccum.elastic.run import hand_over
from distaccum.elastic.run.carried import Carried
from distaccum.engines.base import EngineState

PARAMETERS = tuple("abcd")
Held = tuple[tuple[str, int], ...]


class BrokenError(AssertionError):
    """Something that has to hold did not."""


@dataclass(frozen=True)
class Rules:
    """What the search takes for granted of a step's order; others are mutants.

    Args:
        sends_weights_at: the place at which a member sends its weights.
        keeps_before: whether a member keeps what it had before the view until its first window is made.
        looks_ahead: whether a member that is behind takes its state of after the step.
    """

    sends_weights_at: int = 3
    keeps_before: bool = True
    looks_ahead: bool = True


def _share(held: Held) -> Share:
    return Share(parameters=frozenset(name for name, _ in held), values={f"state.{n}.window": w for n, w in held})


def _held(share: Share) -> Held:
    return tuple(sorted((name, share.values[f"state.{name}.window"]) for name in share.parameters))


def _dealt(rank: int, ranks: int, window: int) -> Held:
    """What a rank steps, and what its predecessor does."""
    mine = {rank, (rank - 1) % ranks}
    return tuple((name, window) for i, name in enumerate(PARAMETERS) if i % ranks in mine)


def _places(ranks: int, rules: Rules) -> Iterator[tuple[int, ...]]:
    """How far the members of a view may have come."""
    for places in product(range(5), repeat=ranks):
        for rank, place in enumerate(places):
            allowed = place < 2 or min(places) >= 1
            allowed &= place < 3 or places[rank - 1] >= 2
            allowed &= place < 4 or min(places) >= rules.sends_weights_at
            if not allowed:
                break
        else:
            yield places


def _carried(window: int, shares: Shares) -> Carried:
    run = RunState(progress=Progress(window=window, step=window), position={}, wandb_id="", config={}, callbacks={})
    state = EngineState(model={}, optimizer={}, optimizer_values={})
    return Carried(
        run=run, engine=state, shares=shares, average=None, owed=None, saved_step=0, evaluation=None, verified=True
    )


def _left(place: int, rank: int, ranks: int, before: Held, rules: Rules) -> Carried:
    """What a member has when it leaves a view that has begun after window 0."""
    begun = _carried(0, Shares(now=_share(before)))
    if place == 0:
        return begun
    now, ahead = _share(_dealt(rank, ranks, 0)), _share(_dealt(rank, ranks, 1))
    if place == 4:
        return _carried(1, Shares(now=ahead))
    shares = Shares(now=now, torn=place > 1, ahead=ahead if place == 3 else None)
    return _carried(0, shares.with_those_of(Shares(now=_share(before))) if rules.keeps_before else shares)


class Search:
    """All that can happen from a first view of some members on.

    Args:
        members: of it.
        deaths: in all views together.
        newcomers: that may come.
        rules: of a step.
    """

    def __init__(self, members: int, deaths: int, newcomers: int = 0, rules: Rules | None = None) -> None:
        self.rules = rules or Rules()
        self.states = self.lost = 0
        self._seen: set[tuple[tuple[Held, ...], int, int]] = set()
        self._view(tuple(_dealt(rank, members, 0) for rank in range(members)), deaths, newcomers)

    def _view(self, before: tuple[Held, ...], deaths: int, newcomers: int) -> None:
        """A view whose members have these shares of one window, which is counted from."""
        if (before, deaths, newcomers) in self._seen:
            return
        self._seen.add((before, deaths, newcomers))
        ranks = len(before)
        for places in _places(ranks, self.rules):
            for count in range(1, min(deaths, ranks - 1) + 1):
                for dead in combinations(range(ranks), count):
                    self._next(before, places, frozenset(dead), deaths - count, newcomers)

    def _next(
        self, before: tuple[Held, ...], places: tuple[int, ...], dead: frozenset[int], deaths: int, newcomers: int
    ) -> None:
        self.states += 1
        ranks = len(before)
        left = {f"{r}": _left(places[r], r, ranks, before[r], self.rules) for r in range(ranks) if r not in dead}
        for coming in range(min(1, newcomers) + 1):
            view = View(generation=1, members=(*left, *["new"] * coming))
            reports = {name: one.report(name) for name, one in left.items()}
            if coming:
                reports["new"] = Report(member="new", position=NEWCOMER)
            chosen = [self._chosen(left.get(name), view, reports, name) for name in view.members]
            window = max(one.run.progress.window for one in left.values())
            found = {pair for one in chosen for pair in _held(one)}
            where = f"{before} at {places}, of which {sorted(dead)} die"
            if any(of != window for _, of in found):
                raise BrokenError(f"{where}: {sorted(found)} are not all of window {window}")
            lost = set(PARAMETERS) - {name for name, _ in found}
            if len(dead) == 1 and lost and len(before) > 1 and _is_whole(before, dead):
                raise BrokenError(f"{where}: {sorted(lost)} are lost with one rank")
            if lost:
                self.lost += 1
                continue
            again = tuple(tuple((name, 0) for name, _ in _held(one)) for one in chosen)
            self._view(again, deaths, newcomers - coming)

    def _chosen(self, own: Carried | None, view: View, reports: dict[str, Report], name: str) -> Share:
        if not self.rules.looks_ahead and own is not None and own.shares is not None:
            return own.shares.now
        return hand_over._shares(own, view, reports, name).now


def _is_whole(before: tuple[Held, ...], dead: frozenset[int]) -> bool:
    """Whether those who are left had the whole state before the view began to deal it."""
    left = {name for rank, held in enumerate(before) if rank not in dead for name, _ in held}
    return left == set(PARAMETERS)
