"""Leases, the next lives, and when the store and a stalled agent leave."""

from __future__ import annotations

import time

import pytest
from torch.distributed import HashStore

from distaccum.elastic.agent import stall, store_process
from distaccum.elastic.agent.board import Board
from distaccum.elastic.agent.lease import LEASE_S, Lease
from distaccum.elastic.agent.respawns import MOST_SHORT, PAUSE_S, SHORT_S, Respawns
from distaccum.elastic.agent.stall import StallGuard
from distaccum.elastic.agent.store_process import ALONE_S, LINGER_S, SILENT_S, Watch
from distaccum.elastic.agent.workers import how


def test_a_node_whose_beats_stop_is_silent_and_one_that_never_came_is_not() -> None:
    beats = {1: 0, 2: 5}
    lease = Lease(3, 0, beats.__getitem__)
    assert lease.silent(100) == []
    assert lease.silent(100 + LEASE_S) == []
    assert lease.silent(101 + LEASE_S) == [2]
    assert lease.silent(102 + LEASE_S) == [2]
    beats[2] = 6
    assert lease.silent(500) == []  # however long nobody has looked
    assert lease.silent(500 + LEASE_S) == []


def test_a_next_life_comes_after_a_pause() -> None:
    respawns = Respawns()
    assert respawns.note(1, 1000, 5)
    assert respawns.next() == 5 + PAUSE_S
    assert respawns.due(5) == []
    assert respawns.due(5 + PAUSE_S) == [1]
    assert (respawns.due(99), respawns.next()) == ([], None)
    respawns.note(0, 1000, 5)
    respawns.drop()
    assert respawns.next() is None


def test_a_place_whose_workers_never_last_is_given_up() -> None:
    respawns = Respawns()
    short = SHORT_S / 2
    assert [respawns.note(0, short, 0) for _ in range(MOST_SHORT - 1)] == [True] * (MOST_SHORT - 1)
    assert respawns.note(1, short, 0)
    assert respawns.note(0, SHORT_S, 0)  # it has lasted
    assert [respawns.note(0, short, 0) for _ in range(MOST_SHORT)][-1] is False


def test_how_a_worker_has_ended() -> None:
    assert [how(code) for code in (0, 3, -9, -44)] == [
        "ended with exit code 0",
        "ended with exit code 3",
        "was killed by SIGKILL",
        "was killed by signal 44",
    ]


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many sockets the store has; the first is its own."""
    number = [1]
    monkeypatch.setattr(store_process, "sockets", lambda: number[0])
    return number


def test_the_store_leaves_once_nobody_is_there(connections: list[int]) -> None:
    store = HashStore()
    board, watch = Board(store), Watch(store, 0)
    assert not watch.is_over(ALONE_S)
    connections[0] = 2
    assert not watch.is_over(2 * ALONE_S)  # a stopped agent: its workers are there
    connections[0] = 1
    assert not watch.is_over(3 * ALONE_S)
    assert watch.is_over(3 * ALONE_S + 1)
    board.beat(0)
    assert not watch.is_over(4 * ALONE_S)


def test_the_store_leaves_after_long_silence_whatever_is_still_connected(connections: list[int]) -> None:
    watch = Watch(HashStore(), 0)
    connections[0] = 2
    assert not watch.is_over(SILENT_S)
    assert watch.is_over(SILENT_S + 1)


def test_the_store_leaves_when_the_job_has_ended_and_all_have_gone(connections: list[int]) -> None:
    store = HashStore()
    board, watch = Board(store), Watch(store, 0)
    connections[0] = 2
    board.end(0, "")
    assert not watch.is_over(1)
    assert not watch.is_over(LINGER_S)
    connections[0] = 1
    assert watch.is_over(LINGER_S)
    connections[0] = 2
    assert watch.is_over(LINGER_S + 2)


def test_an_agent_that_stalls_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stall, "STALL_S", 2)
    ended: list[float] = []
    guard = StallGuard(lambda: ended.append(time.monotonic()))
    for _ in range(30):
        guard.turn()
        time.sleep(0.1)
    assert not ended
    deadline = time.monotonic() + 20
    while not ended:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    guard.close()
