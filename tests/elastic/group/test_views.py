"""Views, reports and the rules between them, by hand and in all states of small runs; how a group is left."""

import json
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore

from distaccum.elastic.group import polled_group
from distaccum.elastic.group.polled_group import PolledGroup
from distaccum.elastic.group.views import NEWCOMER, Node, Report, Share, View, behind, propose, shares_of, source_of
from distaccum.errors import DistaccumError
from tests.support.elastic_model import Bounds, BrokenError, Found, Model, search
from tests.support.elastic_mutants import MUTANTS

VIEW = View(generation=3, members=("a", "b", "c"))


def _reports(**positions: int) -> dict[str, Report]:
    return {member: Report(member=member, position=position) for member, position in positions.items()}


def _propose(
    reports: dict[str, Report],
    candidates: tuple[str, ...] = (),
    gone: frozenset[str] | set[str] = frozenset(),
    *,
    expels: bool = False,
    least: int = 1,
) -> tuple[str, ...] | None:
    view = propose(VIEW, reports, candidates, gone, expels=expels, least=least)
    assert view is None or view.generation == 4
    return view and view.members


def test_a_view_and_a_report_are_the_same_after_the_store() -> None:
    assert [VIEW.rank_of(member) for member in "abcd"] == [0, 1, 2, None]
    assert View.from_json(VIEW.to_json()) == VIEW
    report = Report(member="a", position=7, held=((0, 2), (4, 5)), note={"window": {"count": 8}})
    assert Report.from_json(report.to_json().encode()) == report
    assert Report.from_json(json.dumps({"member": "a", "position": -1, "other": 1})) == Report(
        member="a", position=NEWCOMER
    )
    assert {Report(member="a", position=7), Report(member="a", position=7)} == {Report(member="a", position=7)}


def test_it_waits_until_all_have_reported_or_are_gone() -> None:
    assert _propose(_reports(a=4, c=4)) is None
    assert _propose(_reports(c=4, a=4), gone={"b"}) == ("a", "c")
    assert _propose(_reports(a=4, b=2, c=4)) == ("a", "b", "c")


def test_who_is_in_the_next_view_and_in_which_order() -> None:
    assert _propose(_reports(b=4), expels=True) == ("b",)
    assert _propose(_reports(b=4), expels=True, least=2) is None
    assert _propose(_reports(a=4, b=4, c=4), gone={"a"}) == ("b", "c")
    assert _propose(_reports(a=4, b=4, c=4), ("e", "d", "e", "a")) == ("a", "b", "c", "e", "d")
    assert _propose(_reports(a=4), ("e", "d"), {"b", "c", "e"}, least=2) == ("a", "d")
    assert _propose({}, ("d",), {"a", "b", "c"}) is None
    assert _propose(_reports(a=NEWCOMER), ("d",), {"b", "c"}) is None


def test_the_furthest_hands_its_state_over_and_the_first_of_several() -> None:
    assert source_of(VIEW, _reports(a=2, b=4, c=4)) == "b"
    assert behind(VIEW, _reports(a=2, b=4, c=4)) == ("a",)
    assert behind(VIEW, _reports(a=4, b=4, c=4)) == ()
    joined = View(generation=4, members=("b", "d"))
    assert (source_of(joined, _reports(a=6, b=0)), behind(joined, _reports(a=6, b=0))) == ("b", ("d",))


def test_what_counts_is_held_at_the_sources_position_and_once() -> None:
    reports = {
        "a": Report(member="a", position=2, held=((0, 4),)),
        "b": Report(member="b", position=4, held=((0, 2), (1, 2))),
        "c": Report(member="c", position=4, held=((1, 2), (4, 5), (6, 9))),
    }
    assert shares_of(VIEW, reports, 8) == (
        Share(held=(), blocks=(2,)),
        Share(held=((0, 2),), blocks=(3, 5)),
        Share(held=((4, 5),), blocks=(6, 7)),
    )


@pytest.mark.parametrize("blocks", [1, 2, 7])
def test_without_reports_all_blocks_are_dealt(blocks: int) -> None:
    shares = shares_of(VIEW, {}, blocks)
    assert [block for share in shares for block in share.blocks] == list(range(blocks))
    assert not any(share.held for share in shares)


_NODES = st.lists(st.tuples(st.integers(-1, 12), st.integers(-1, 12)), max_size=5).map(tuple)


@settings(derandomize=True, database=None)
@given(st.lists(st.tuples(st.integers(-1, 3), _NODES), min_size=1, max_size=6), st.integers(1, 12))
def test_each_block_is_in_one_share(told: list[tuple[int, tuple[Node, ...]]], blocks: int) -> None:
    reports = {str(i): Report(member=str(i), position=position, held=held) for i, (position, held) in enumerate(told)}
    shares = shares_of(View(generation=1, members=tuple(reports)), reports, blocks)
    held = [block for share in shares for node in share.held for block in range(*node)]
    dealt = [block for share in shares for block in share.blocks]
    assert sorted(held + dealt) == list(range(blocks))
    assert dealt == sorted(dealt)
    assert max(len(share.blocks) for share in shares) - min(len(share.blocks) for share in shares) <= 1
    furthest = max(position for position, _ in told)
    for share, (position, nodes) in zip(shares, told, strict=True):
        assert set(share.held) <= set(nodes)
        assert position == furthest or not share.held


def _search(bounds: Bounds, *, circles: bool = True) -> Found:
    found = search(Model(bounds), circles=circles)
    print(f"{bounds}: {found}")
    assert found.lasts["done"]
    return found


@pytest.mark.parametrize(
    "bounds",
    [
        Bounds(deaths=2, newcomers=1),
        Bounds(deaths=1, newcomers=1, least=2, stages=True),
        Bounds(deaths=1, slips=1, expulsions=1),
        Bounds(deaths=1, lies=1, stages=True),
        Bounds(deaths=2, newcomers=1, expulsions=1, windows=1, blocks=2),
        Bounds(members=3, deaths=3, stages=True),
        Bounds(members=3, deaths=2, windows=3, blocks=4),
        Bounds(members=3, deaths=1, newcomers=1, windows=1, blocks=3),
        Bounds(members=3, deaths=1, expulsions=1, windows=1, blocks=2),
    ],
    ids=str,
)
def test_all_states_of_a_small_run_hold(bounds: Bounds) -> None:
    _search(bounds)


@pytest.mark.heavy
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "bounds",
    [
        Bounds(members=4, deaths=3),
        Bounds(members=3, deaths=3, newcomers=1),
        Bounds(members=3, deaths=1, slips=1, expulsions=1),
        Bounds(members=3, deaths=1, newcomers=1, blocks=4),
        Bounds(members=3, deaths=1, lies=1),
        Bounds(members=2, deaths=2, newcomers=1, slips=1, expulsions=1, windows=1, blocks=2),
        Bounds(members=2, deaths=2, newcomers=1, lies=1, windows=1, blocks=2),
        Bounds(members=2, deaths=3, newcomers=1, windows=3, blocks=4, stages=True),
    ],
    ids=str,
)
def test_all_states_of_a_larger_run_hold(bounds: Bounds) -> None:
    _search(bounds, circles=False)


def test_a_run_ends_as_long_as_enough_members_live() -> None:
    assert set(_search(Bounds(members=3, deaths=0)).lasts) == {"done"}
    assert set(_search(Bounds(members=3, deaths=2)).lasts) == {"done"}
    assert set(_search(Bounds(members=2, deaths=1, least=2)).lasts) == {"done", "too few"}


@pytest.mark.parametrize("name", MUTANTS)
def test_what_is_broken_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = MUTANTS[name]
    mutant.apply(monkeypatch)
    with pytest.raises(BrokenError, match=mutant.said) as raised:
        search(Model(mutant.bounds, mutant.rules))
    print(raised.value)


class Work:
    """An operation that gloo never ends."""

    def is_completed(self) -> bool:
        return False

    def wait(self, _: timedelta) -> None:
        """Not called."""


class Gloo:
    """Answers a receive with ``said``, once the connections were closed."""

    def __init__(self, said: str) -> None:
        self._said = ["Timed out waiting 1ms for recv operation to complete"], said
        self.closed = 0

    def recv(self, *_: Any) -> Any:
        """Raises what gloo says."""
        self.closed += 1
        first, then = self._said
        raise RuntimeError(first.pop() if first else then)


def _left(said: str, monkeypatch: pytest.MonkeyPatch) -> Gloo:
    monkeypatch.setattr(polled_group, "_UNTOLD_S", 0.05)
    monkeypatch.setattr(polled_group, "_DRAIN_S", 0.3)
    monkeypatch.setattr(polled_group, "_STUCK", [])
    gloo = Gloo(said)
    group = PolledGroup(gloo, HashStore(), 0, 2, lost=str, limit_s=lambda: None)
    group._started.add(Work())
    group.leave()
    return gloo


@pytest.mark.parametrize("said", ["Connection closed by peer [127.0.0.1]:1", "Application timeout caused pair closure"])
def test_a_send_that_gloo_tells_nothing_of_a_closed_connection_holds_nobody_up(
    said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gloo = _left(said, monkeypatch)
    assert gloo.closed == 2
    assert [gloo] == polled_group._STUCK  # or freeing it would wait for the send's time-out


def test_with_a_connection_that_is_open_its_tensors_are_not_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DistaccumError, match="does not let go of the tensors"):
        _left("Timed out waiting 1ms for recv operation to complete", monkeypatch)
