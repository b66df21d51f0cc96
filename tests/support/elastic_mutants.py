"""Ways to break the protocol of elastic runs; each is noticed by the search or by the simulation."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from distaccum.elastic.group import views
from distaccum.elastic.group.views import Report, Share, View
from tests.support.elastic_model import Bounds, Rules


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """What is broken, where it shows, and what is said of it.

    Args:
        said: a pattern of the error.
        bounds: of a small search that has it.
        rules: what members do otherwise outside of views.py.
        patches: what takes the place of a function of views.py.
    """

    said: str
    bounds: Bounds = field(default_factory=Bounds)
    rules: Rules = field(default_factory=Rules)
    patches: Mapping[str, Callable[..., object]] | None = None

    def apply(self, patch: pytest.MonkeyPatch) -> None:
        for name, function in (self.patches or {}).items():
            patch.setattr(views, name, function)


_propose, _shares_of = views.propose, views.shares_of


def _deals_what_is_held(view: View, reports: Mapping[str, Report], blocks: int) -> tuple[Share, ...]:
    shares, dealt = _shares_of(view, reports, blocks), _shares_of(view, {}, blocks)
    return tuple(replace(share, blocks=all_of.blocks) for share, all_of in zip(shares, dealt, strict=True))


def _forgets_what_is_held(view: View, reports: Mapping[str, Report], blocks: int) -> tuple[Share, ...]:
    return tuple(replace(share, held=()) for share in _shares_of(view, reports, blocks))


def _counts_those_behind(view: View, reports: Mapping[str, Report], blocks: int) -> tuple[Share, ...]:
    alike = {member: replace(report, position=0) for member, report in reports.items()}
    return _shares_of(view, alike, blocks)


def _the_last(view: View, reports: Mapping[str, Report]) -> str:
    return min(view.members, key=lambda member: reports[member].position if member in reports else views.NEWCOMER)


def _those_ahead(view: View, reports: Mapping[str, Report]) -> tuple[str, ...]:
    last = reports[_the_last(view, reports)].position
    return tuple(member for member in view.members if reports[member].position != last)


def _nobody(view: View, reports: Mapping[str, Report]) -> tuple[str, ...]:
    return ()


def _proposes(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[..., View | None]:
    """A ``propose`` that is given something else."""

    def propose(*given: object, **settings: object) -> View | None:
        named: dict[str, Any] = dict(zip(("view", "reports", "candidates", "gone"), given, strict=True), **settings)
        return _propose(**named | change(named))

    return propose


def _keeps_the_gone(view: View, *given: Any, **settings: Any) -> View | None:
    found = _propose(view, *given, **settings)
    return found and replace(found, members=tuple(dict.fromkeys(view.members + found.members)))


def _with_a_state(given: dict[str, Any]) -> dict[str, Any]:
    return {"reports": {member: replace(report, position=0) for member, report in given["reports"].items()}}


_waits_for_nobody = _proposes(lambda given: {"expels": True})
_forgets_candidates = _proposes(lambda given: {"candidates": ()})
_goes_on_without_a_state = _proposes(_with_a_state)

_JOINED = Bounds(newcomers=1)
_THREE = Bounds(members=3)
_LATE = Bounds(deaths=1, slips=1, expulsions=1)

MUTANTS: dict[str, Mutant] = {
    "blocks that are held are dealt": Mutant(
        said="hold the same block|commits the blocks", patches={"shares_of": _deals_what_is_held}
    ),
    "blocks that are held are forgotten": Mutant(
        said="commits the blocks|gradients of the states", patches={"shares_of": _forgets_what_is_held}
    ),
    "what a member behind holds counts": Mutant(
        said="does not hold|commits the blocks", bounds=_THREE, patches={"shares_of": _counts_those_behind}
    ),
    "the last is the source": Mutant(said=".", bounds=_THREE, patches={"source_of": _the_last}),
    "the last is the source, and all go by it": Mutant(
        said="goes back", bounds=_THREE, patches={"source_of": _the_last, "behind": _those_ahead}
    ),
    "who is behind is not given the state": Mutant(said=".", bounds=_THREE, patches={"behind": _nobody}),
    "a newcomer is not given the state": Mutant(
        said="goes on without a state|apart", bounds=_JOINED, patches={"behind": _nobody}
    ),
    "two views of one generation": Mutant(said="two views", bounds=_JOINED, rules=Rules(compares=False)),
    "proposes before all have reported": Mutant(
        said="left out, and nobody has taken it for dead", bounds=_THREE, patches={"propose": _waits_for_nobody}
    ),
    "leaves nobody out": Mutant(said="no end after", patches={"propose": _keeps_the_gone}),
    "asks for a view for candidates and leaves them out": Mutant(
        said="no end after", bounds=_JOINED, patches={"propose": _forgets_candidates}
    ),
    "candidates go on alone": Mutant(
        said="goes on without a state",
        bounds=Bounds(newcomers=2, deaths=3, windows=1, blocks=1),
        patches={"propose": _goes_on_without_a_state},
    ),
    "a newcomer begins at 0": Mutant(said="with the state -1", bounds=_JOINED, rules=Rules(newcomer=0)),
    "asks for a view for who is in it": Mutant(said="no end after", bounds=_JOINED, rules=Rules(asks_once=False)),
    "a newcomer looks at the newest view only": Mutant(
        said="nothing moves",
        bounds=Bounds(newcomers=1, deaths=1, slips=1, expulsions=1, least=2, windows=1, blocks=1),
        rules=Rules(reads_all_views=False),
    ),
    "steps without a look at the store": Mutant(
        said="commits in a view that is over", bounds=_LATE, rules=Rules(looks=False)
    ),
    "ends after its last step": Mutant(said="the run has ended, and", rules=Rules(ends_together=False)),
    "waits for a view after the end": Mutant(
        said="the run has ended without", bounds=Bounds(least=2), rules=Rules(reads_the_end=False)
    ),
    "only rank 0 tells of the end": Mutant(said="nobody has told the store", rules=Rules(all_tell_the_end=False)),
    "a state is written over while it comes": Mutant(
        said="had a state, and has none any more",
        bounds=Bounds(members=3, deaths=2),
        rules=Rules(stages_the_state=False),
    ),
}
