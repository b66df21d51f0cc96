"""Which checkpoint in memory a view goes back to, and who keeps whose share."""

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import product

import pytest

from distaccum.elastic.group import mirrors
from distaccum.elastic.group.mirrors import Mark, keepers_of, newest_whole, to_note
from distaccum.elastic.group.views import NEWCOMER, Report, View

OLD, NEW = Mark(window=10, generation=0, step=9, ranks=3), Mark(window=20, generation=0, step=19, ranks=3)


def _report(member: str, **held: Sequence[int]) -> Report:
    marks = {"old": OLD, "new": NEW}
    note = json.loads(json.dumps({"memory": to_note({marks[name]: shares for name, shares in held.items()})}))
    return Report(member=member, position=1, note=note)


def _view(*members: str) -> View:
    return View(generation=1, members=members)


def test_the_newest_whole_one_counts() -> None:
    reports = {"a": _report("a", old=(0, 2), new=(0, 2)), "b": _report("b", old=(1, 0), new=(1, 0))}
    assert newest_whole(_view("a", "b"), reports) == (NEW, (0, 1, 0))
    assert newest_whole(_view("b", "a"), reports) == (NEW, (0, 0, 1))
    assert newest_whole(_view("a"), reports) is None
    reports["b"] = _report("b", old=(1, 0))
    assert newest_whole(_view("a", "b"), reports) == (OLD, (0, 1, 0))


def test_a_newcomer_has_none() -> None:
    reports = {"new": Report(member="new", position=NEWCOMER), "a": _report("a", old=(0, 1, 2))}
    assert newest_whole(_view("new", "a"), reports) == (OLD, (1, 1, 1))
    assert newest_whole(_view("new"), reports) is None
    assert newest_whole(_view("nobody"), {}) is None


def test_of_the_same_window_that_of_the_later_view_counts() -> None:
    later = Mark(window=10, generation=1, step=9, ranks=1)
    note = {"memory": [*to_note({OLD: (0, 1, 2), later: (0,)})]}
    assert newest_whole(_view("a"), {"a": Report(member="a", position=1, note=note)}) == (later, (0,))


def test_a_share_is_kept_on_another_node_as_far_as_there_are_any() -> None:
    assert keepers_of(["0.0.1"]) == (0,)
    assert keepers_of(["0.0.1", "0.1.1", "0.2.1"]) == (1, 2, 0)
    assert keepers_of(["0.0.1", "0.1.1", "1.0.1", "1.1.1"]) == (2, 3, 0, 1)
    for members in (["0.0.1", "1.0.1", "0.1.2", "1.1.1"], ["0.0.1", "0.1.1", "1.0.1", "2.0.1"], ["1.0.1", "0.0.9"]):
        nodes = [member[0] for member in members]
        keepers = keepers_of(members)
        assert sorted(keepers) == list(range(len(members)))
        assert all(nodes[rank] != nodes[keeper] for rank, keeper in enumerate(keepers))
    assert sorted(keepers_of(["0.0.1", "0.1.1", "0.2.1", "1.0.1"])) == [0, 1, 2, 3]


def _stages(ranks: int, *, may_prove_early: bool = False) -> Iterator[tuple[tuple[Mark, ...], ...]]:
    """What each rank may have at any moment of an exchange, and of the window after it."""
    old, new = Mark(window=4, generation=0, step=4, ranks=ranks), Mark(window=8, generation=0, step=8, ranks=ranks)
    for stages in product(((old,), (old, new), (new,)), repeat=ranks):
        if may_prove_early or (new,) not in stages or (old,) not in stages:  # proven: all have it
            yield stages


def _survives(stages: Sequence[Sequence[Mark]], gone: Sequence[int]) -> bool:
    members = [f"0.{rank}.1" for rank in range(len(stages))]
    keepers = mirrors.keepers_of(members)
    reports = {
        member: Report(
            member=member,
            position=1,
            note={"memory": to_note({mark: (rank, keepers.index(rank)) for mark in stages[rank]})},
        )
        for rank, member in enumerate(members)
    }
    left = tuple(member for rank, member in enumerate(members) if rank not in gone)
    return newest_whole(View(generation=1, members=left), reports) is not None


def _all_survive(ranks: int, *, may_prove_early: bool = False) -> bool:
    apart = [(one,) for one in range(ranks)]
    apart += [(one, other) for one in range(ranks) for other in range(one + 2, ranks) if (other + 1) % ranks != one]
    return all(_survives(stages, gone) for stages in _stages(ranks, may_prove_early=may_prove_early) for gone in apart)


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_whoever_dies_at_whatever_moment_one_is_whole(ranks: int) -> None:
    assert _all_survive(ranks)


def test_one_is_not_whole_where_neighbours_die_at_once() -> None:
    stages = next(_stages(4))
    assert _survives(stages, (0, 2))
    assert not _survives(stages, (1, 2))
    assert not _survives(stages, (3, 0))


def _itself(members: Sequence[str]) -> tuple[int, ...]:
    return tuple(range(len(members)))


def _the_first(members: Sequence[str]) -> tuple[int, ...]:
    return (1, *(0 for _ in members[1:]))


@pytest.mark.parametrize("keepers", [_itself, _the_first])
def test_mutant_other_keepers_lose_a_share(
    keepers: Callable[[Sequence[str]], tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirrors, "keepers_of", keepers)
    with pytest.raises((AssertionError, ValueError)):
        assert _all_survive(4)


def test_mutant_a_checkpoint_that_is_dropped_at_once_is_missed() -> None:
    assert not _all_survive(3, may_prove_early=True)
