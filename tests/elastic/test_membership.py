"""Members that die, stop and join: the others agree on who is left, by the store, and go on in a new group."""

import signal
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distaccum.elastic.group.membership import ExpelledError, Membership, TooFewMembersError
from distaccum.elastic.group.polled_group import ViewChangedError, leave_default
from distaccum.elastic.group.views import NEWCOMER, Report, View
from tests.support.commands import until
from tests.support.members import Members, Notes, members

FOUR = ("0.0.0", "0.1.0", "1.0.0", "1.1.0")


def live(store: Any, name: str, notes: Notes, first: Sequence[str], settings: dict[str, Any]) -> None:
    """A member: one sum a window, in which all say whether somebody waits to join. Position: how many it has done."""
    membership = Membership(store, name, **settings)
    view: View | None = membership.begin(first) if name in first else None
    done = 0 if view else NEWCOMER
    try:
        if view is None:
            membership.say_ready()
            notes.write("ready")
            view, reports = membership.regroup(None, Report(member=name, position=done))
            notes.write("view", members=view.members, positions=[reports[each].position for each in view.members])
        while True:
            try:
                group = membership.open_group(view)
                with group.changes():
                    state = torch.tensor([float(done)])
                    dist.all_reduce(state, op=dist.ReduceOp.MAX)
                    done = int(state.item())
                    notes.write("first", generation=view.generation, members=view.members)
                    while True:
                        tensor = torch.tensor([1.0, float(membership.wishes())])
                        dist.all_reduce(tensor)
                        if tensor[1] > 0:
                            break  # somebody waits
                        done += 1
                        assert tensor[0] == len(view.members)
            except ViewChangedError as change:
                notes.write("changed", text=str(change))
            leave_default()
            view, reports = membership.regroup(view, Report(member=name, position=done))
            notes.write("view", members=view.members, positions=[reports[each].position for each in view.members])
    except (ExpelledError, TooFewMembersError) as error:
        notes.write(type(error).__name__, text=str(error))


def _start(started: Members, names: Sequence[str], **settings: Any) -> None:
    for name in names:
        started.start(name, live, names, settings)
    for name in names:
        started.await_notes(name, "first")


def _await_view(started: Members, names: Sequence[str], generation: int, expected: Sequence[str]) -> float:
    """When the last of them has done its first sum in that generation."""
    firsts = []
    deadline = time.monotonic() + 30
    for name in names:
        while not (found := [e for e in started.notes(name).of("first") if e["generation"] >= generation]):
            assert time.monotonic() < deadline, {each: started.notes(each).read()[-4:] for each in names}
            time.sleep(0.002)
        if found[0]["generation"] == generation:
            assert tuple(found[0]["members"]) == tuple(expected)
            firsts.append(found[0]["at"])
    return max(firsts)


def _await_first(started: Members, name: str, told: Mapping[str, Any]) -> Mapping[str, Any]:
    """A member's first sum of which its note says this."""
    notes = started.notes(name)
    first: Mapping[str, Any] = until(
        lambda: next((e for e in notes.of("first") if told.items() <= e.items()), None), 30, told=notes.read
    )
    return first


@pytest.mark.parametrize("dead", [(1,), (0, 3), (0, 1, 2)])
def test_members_that_die_at_once_are_left_out(tmp_path: Path, dead: tuple[int, ...]) -> None:
    with members(tmp_path) as started:
        _start(started, FOUR)
        time.sleep(0.2)
        left = [name for i, name in enumerate(FOUR) if i not in dead]
        killed = [started.signal(FOUR[i]) for i in dead][-1]
        until(
            lambda: all(
                (found := started.notes(name).of("first")) and found[-1]["members"] == list(left) for name in left
            ),
            30,
            told=lambda: {name: started.notes(name).read()[-4:] for name in left},
        )
        at = max(started.notes(name).of("first")[-1]["at"] for name in left)
        print(f"{len(dead)} of 4 killed: the others go on after {1000 * (at - killed):.0f} ms")
        views = [[(each["members"], each["positions"]) for each in started.notes(name).of("view")] for name in left]
        assert all(each == views[0] for each in views)  # the same reports, too
        assert max(views[0][-1][1]) - min(views[0][-1][1]) <= 1


def test_members_die_one_after_the_other(tmp_path: Path) -> None:
    with members(tmp_path) as started:
        _start(started, FOUR)
        for generation, dies in enumerate((0, 2, 1), start=1):
            left = [name for name in FOUR if name not in {FOUR[i] for i in (0, 2, 1)[:generation]}]
            killed = started.signal(FOUR[dies])
            print(f"{1000 * (_await_view(started, left, generation, left) - killed):.0f} ms to generation {generation}")


def test_a_newcomer_joins_when_it_is_ready(tmp_path: Path) -> None:
    with members(tmp_path) as started:
        _start(started, FOUR[:2])
        started.start("0.0.1", live, (), {})
        ready = started.await_notes("0.0.1", "ready")[0]["at"]
        after = (*FOUR[:2], "0.0.1")
        print(f"{1000 * (_await_view(started, after, 1, after) - ready):.0f} ms")
        view = started.notes("0.0.1").of("view")[0]
        assert view["positions"][2] == NEWCOMER
        assert view == started.notes(FOUR[0]).of("view")[0] | {"at": view["at"]}
        started.signal(FOUR[0])
        _await_view(started, after[1:], 2, after[1:])  # the newcomer is a member as any other


def test_a_stopped_member_is_expelled(tmp_path: Path) -> None:
    with members(tmp_path) as started:
        _start(started, FOUR[:3], expel_after_s=4.0, limit_s=4.0)  # a busy machine may keep a member waiting, too
        stopped = started.signal(FOUR[1], signal.SIGSTOP)
        left = [FOUR[0], FOUR[2]]
        among = {"members": left}  # another view may come first, where a busy machine keeps a member waiting
        firsts = [_await_first(started, name, among) for name in left]
        assert max(first["at"] for first in firsts) - stopped > 7.9
        started.signal(FOUR[1], signal.SIGCONT)
        text = started.await_notes(FOUR[1], "ExpelledError")[0]["text"]
        assert text == f"generation {firsts[0]['generation']} goes on without member 0.1.0"
        assert started.ended(FOUR[1])


def test_too_few_wait_for_a_newcomer_and_then_give_up(tmp_path: Path) -> None:
    with members(tmp_path) as started:
        settings = {"least": 2, "wait_for_least_s": 1.0}
        _start(started, FOUR[:2], **settings)
        started.signal(FOUR[1])
        started.await_notes(FOUR[0], "changed")
        started.start("0.1.1", live, (), settings)
        _await_view(started, [FOUR[0], "0.1.1"], 1, [FOUR[0], "0.1.1"])
        started.signal("0.1.1")
        text = started.await_notes(FOUR[0], "TooFewMembersError")[0]["text"]
        assert "1 of 2 members are left, and 0 wait to join; the run goes on with 2 or more" in text


def test_a_member_that_dies_while_it_waits_for_the_view_is_left_out(tmp_path: Path) -> None:
    """Rank 1 stops, so that the others wait for it with their reports; one of these dies; then rank 1 goes on."""
    with members(tmp_path) as started:
        _start(started, FOUR, limit_s=0.3)
        started.signal(FOUR[1], signal.SIGSTOP)
        for name in (FOUR[0], FOUR[2], FOUR[3]):
            started.await_notes(name, "changed")
        time.sleep(0.1)
        started.signal(FOUR[3])
        time.sleep(0.2)
        started.signal(FOUR[1], signal.SIGCONT)
        _await_view(started, FOUR[:3], 1, FOUR[:3])


def test_words_candidates_and_views_of_the_store(tmp_path: Path) -> None:
    with members(tmp_path) as started:
        membership = Membership(started.store, "a")
        view = membership.begin(["a", "b"])
        assert Membership(started.store, "b").begin(["b", "a"]) == view  # the first has decided
        assert membership.lost(view) == ""
        started.store.add("word-numbers", 1)  # one that is not written yet hides no later one
        started.say("x", "is no member")
        assert membership.lost(view) == ""
        started.say("b", "was killed")
        assert membership.lost(view) == "member b was killed"
        began = time.perf_counter()
        for _ in range(100):
            membership.lost(View(generation=5, members=("a", "c")))
        print(f"asking takes {(time.perf_counter() - began) * 1e4:.0f} us")
        assert not membership.wishes()
        Membership(started.store, "c").say_ready()
        Membership(started.store, "b").say_ready()  # gone, and was in a view
        assert membership.waiting() == ("c",)
        next_view, reports = membership.regroup(view, Report(member="a", position=4, held=((0, 2),)))
        assert next_view == View(generation=1, members=("a", "c"))
        assert reports == {
            "a": Report(member="a", position=4, held=((0, 2),)),
            "c": Report(member="c", position=NEWCOMER),
        }
        newcomer = Membership(started.store, "c")
        assert newcomer.regroup(None, Report(member="c", position=NEWCOMER)) == (next_view, reports)
        assert not newcomer.wishes()
        out = {name: Membership(started.store, name).is_left_out() for name in "abcd"}
        assert out == {"a": False, "b": True, "c": False, "d": False}  # d has never been in
        assert Membership(started.store, "d").lost(view)
        with pytest.raises(ExpelledError, match="generation 1 goes on without member b"):
            Membership(started.store, "b").regroup(view, Report(member="b", position=4))
        started.store.set("ended", "0")
        with pytest.raises(ExpelledError, match="has ended"):
            Membership(started.store, "d").regroup(None, Report(member="d", position=NEWCOMER))


def test_too_few_say_what_they_wait_for_and_leave_together_once_one_is_told_to(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with members(tmp_path) as started:
        membership = Membership(started.store, "a", least=2)
        view = membership.begin(["a", "b"])
        started.say("b", "was killed")
        told = threading.Event()
        membership.told_to_leave = told.is_set
        threading.Timer(0.5, told.set).start()
        next_view, _ = membership.regroup(view, Report(member="a", position=4))
        assert told.is_set()
        assert next_view == View(generation=1, members=("a",))
        said = "1 of 2 members are left, and 0 wait to join; the run goes on with 2 or more, one of which has its state"
        assert caplog.text.count(f"{said} (elastic.min_ranks): waiting for others, 600 s at most") == 1
