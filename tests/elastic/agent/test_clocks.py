"""Agents: their keys of the store, leases, next lives, when the store and a stalled one leave; their command line."""

import json
import re
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from random import Random

import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore

from distaccum.elastic.agent import stall, store_process
from distaccum.elastic.agent.board import Board, View, Word, has_ended
from distaccum.elastic.agent.lease import LEASE_S, Lease
from distaccum.elastic.agent.respawns import MOST_SHORT, PAUSE_S, SHORT_S, Respawns
from distaccum.elastic.agent.settings import Settings
from distaccum.elastic.agent.stall import StallGuard
from distaccum.elastic.agent.store_process import ALONE_S, LINGER_S, SILENT_S, Watch
from distaccum.elastic.agent.store_start import port_of, start_store
from distaccum.elastic.agent.workers import how
from distaccum.elastic.group.membership import Membership
from distaccum.elastic.group.views import Report
from distaccum.elastic.words import secret_of
from distaccum.errors import ConfigError
from tests.support.commands import until


def test_a_node_whose_beats_stop_is_silent_and_one_that_never_came_is_not() -> None:
    beats = {1: 0, 2: 5}
    lease = Lease(3, 0, beats.__getitem__)
    assert [lease.silent(at) for at in (100, 100 + LEASE_S, 101 + LEASE_S, 102 + LEASE_S)] == [[], [], [2], [2]]
    beats[2] = 6
    assert [lease.silent(at) for at in (500, 500 + LEASE_S)] == [[], []]  # however long nobody has looked


def test_a_next_life_comes_after_a_pause() -> None:
    respawns = Respawns()
    assert respawns.note(1, 1000, 5)
    assert (respawns.next(), respawns.due(5), respawns.due(5 + PAUSE_S)) == (5 + PAUSE_S, [], [1])
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
    assert [how(code) for code in (0, 3)] == ["ended with exit code 0", "ended with exit code 3"]
    assert [how(code) for code in (-9, -44)] == ["was killed by SIGKILL", "was killed by signal 44"]


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many sockets the store has; the first is its own."""
    number = [1]
    monkeypatch.setattr(store_process, "sockets", lambda: number[0])
    return number


def test_the_store_leaves_once_nobody_is_there_or_after_long_silence(connections: list[int]) -> None:
    store = HashStore()
    board, watch = Board(store), Watch(store, 0)
    assert not watch.is_over(ALONE_S)
    connections[0] = 2
    assert not watch.is_over(2 * ALONE_S)  # a stopped agent: its workers are there
    connections[0] = 1
    assert [watch.is_over(3 * ALONE_S + late) for late in (0, 1)] == [False, True]
    board.beat(0)
    assert not watch.is_over(4 * ALONE_S)
    connections[0], silent = 2, Watch(HashStore(), 0)  # whatever is still connected
    assert [silent.is_over(SILENT_S + late) for late in (0, 1)] == [False, True]


def test_the_store_leaves_when_the_job_has_ended_and_all_have_gone(connections: list[int]) -> None:
    store = HashStore()
    board, watch = Board(store), Watch(store, 0)
    connections[0] = 2
    board.end(0, "")
    assert [watch.is_over(at) for at in (1, LINGER_S)] == [False, False]
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
    until(lambda: ended, 20)
    guard.close()


def test_who_comes_first_says_the_run_and_the_shape_and_so_view_0() -> None:
    store = HashStore()
    first, second = Board(store), Board(store)
    assert first.prefix == second.prefix == f"elastic/{first.run}" != Board(HashStore()).prefix
    assert [first.agree_shape(2, 2), second.agree_shape(2, 4)] == [(2, 2)] * 2
    assert second.new_views() == [View(0, ("0.0.1", "0.1.1", "1.0.1", "1.1.1"))]
    assert second.new_views() == []


def test_lives_are_never_used_again() -> None:
    store = HashStore()
    assert Board(store).lives(0, 1) == 0
    assert [Board(store).new_life(0, 1) for _ in range(2)] == [1, 2]
    assert Board(store).new_life(1, 0) == 1
    assert Board(store).lives(0, 1) == 2


def test_words_come_once_and_in_order_and_one_that_is_still_being_written_later() -> None:
    store = HashStore()
    reader, writer = Board(store), Board(store)
    keys = PrefixStore(reader.prefix, store)
    number = keys.add("word-numbers", 1)
    assert reader.new_words() == []
    writer.tell_gone("0.0.1", "was killed by SIGKILL")
    reader.tell_gone("1.0.1", "ended with exit code 1")
    assert reader.new_words() == [Word("0.0.1", "was killed by SIGKILL"), Word("1.0.1", "ended with exit code 1")]
    assert reader.new_words() == []
    keys.set(f"word/{number}", json.dumps({"member": "0.0.1", "how": "was killed by SIGKILL"}))
    keys.add("words", 1)
    assert [word.member for word in reader.new_words()] == ["0.0.1"]


def test_candidates() -> None:
    store = HashStore()
    board = Board(store)
    keys = PrefixStore(board.prefix, store)
    assert board.candidates() == []
    keys.set("candidate-number/1", "0.0.2")
    keys.add("candidates", 2)  # the second is still being written
    assert board.candidates() == ["0.0.2"]
    keys.set("candidate-number/2", "0.1.2")
    assert board.candidates() == ["0.0.2", "0.1.2"]


def test_alone_nothing_has_to_be_said() -> None:
    assert Settings.of([], {}) == Settings()
    assert Settings.of([], {"NPROC": "3"}).nproc == 3
    with pytest.raises(ConfigError, match=r"^NPROC=some: not a number of processes"):
        Settings.of([], {"NPROC": "some"})
    with pytest.raises(ConfigError, match=r"^SHUTDOWN_TIMEOUT=2m: is no number of seconds"):
        Settings.of([], {"SHUTDOWN_TIMEOUT": "2m"})


def test_flags_and_overrides_stand_in_any_order() -> None:
    words = ["seed=1", "--nproc", "4", "--nnodes=2", "model.n_layer=1", "--rdzv=n1:29500", "--node-rank", "1", "+x=2"]
    read = Settings.of(words, {"NPROC": "3"})
    assert (read.nproc, read.nnodes, read.node, read.host, read.port) == (4, 2, 1, "n1", 29500)
    assert read.overrides == ("seed=1", "model.n_layer=1", "+x=2")


def test_what_the_configuration_says_of_elastic_is_read_and_left_to_the_workers() -> None:
    words = ["elastic.rejoin=true", "elastic.min_ranks=2", "elastic.expel_after=1m", "++elastic.rejoin=False"]
    read = Settings.of(words, {})
    assert (read.rejoin, read.least, read.expel_after_s) == (False, 2, 60.0)
    assert read.overrides == tuple(words)
    assert Settings.of(["elastic.expel_after=2.5"], {}).expel_after_s == 2.5
    assert Settings.of(["elastic.expel_after='0:20'"], {}).expel_after_s == 20


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--nproc=x", "--nproc=x: not a number of processes. "),
        ("--nproc 0", "--nproc=0: not a number of processes. "),
        ("--nproc", "--nproc: no value follows it. "),
        ("--nprocs 2", "--nprocs: no such flag; did you mean --nproc"),
        ("--nnodes=two", "--nnodes=two: not a number of nodes. "),
        ("--nnodes=2 --node-rank=0", "--rdzv: not given, and 2 nodes have nowhere to meet. "),
        ("--nnodes=2 --rdzv=n1:1", "--node-rank=: not one of 2 nodes. Give each its own, 0 to 1"),
        ("--nnodes=2 --rdzv=n1:1 --node-rank=2", "--node-rank=2: not one of 2 nodes. "),
        ("--node-rank=1", "--node-rank=1: not one of 1 nodes. "),
        ("--rdzv=n1", "--rdzv=n1: not HOST:PORT. "),
        ("--rdzv=n1:70000", "--rdzv=n1:70000: not HOST:PORT. "),
        ("-m seed=1,2", "-m: an elastic job is one run, and no sweep. "),
        ("hydra.mode=MULTIRUN", "hydra.mode=MULTIRUN: an elastic job is one run"),
        ("elastic.rejoin=maybe", "elastic.rejoin=maybe: neither true nor false. "),
        ("elastic.min_ranks=0", "elastic.min_ranks=0: not a number of ranks. "),
        ("elastic.expel_after=soon", "elastic.expel_after=soon: not a positive length of time. "),
        ("elastic.expel_after=-1", "elastic.expel_after=-1.0: not a positive length of time. "),
    ],
)
def test_what_cannot_be_is_refused(words: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}"):
        Settings.of(words.split(), {})


@pytest.mark.timeout(60)
@pytest.mark.fault("a stranger at the store of an elastic job: junk, forged and replayed words, 300 idle connections")
def test_a_stranger_at_the_store_is_not_heard(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, says: Callable[[str], None]
) -> None:
    monkeypatch.setenv("DISTACCUM_TOKEN", "a secret")
    process = start_store(0, alone=True)
    with ExitStack() as closing:
        closing.callback(process.wait)
        closing.callback(process.kill)
        address = ("127.0.0.1", port_of(process, 0))
        stranger, own = (TCPStore(*address, is_master=False, wait_for_workers=False) for _ in range(2))
        for _ in range(300):
            closing.enter_context(socket.create_connection(address))
        noise = Random(41)  # noqa: S311
        for junk in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 4096, *(noise.randbytes(1 + 97 * i) for i in range(40))):
            with socket.create_connection(address) as connection:
                connection.sendall(junk)

        board = Board(own)
        keys = PrefixStore(board.prefix, stranger)
        forged = {"word/1": '{"member": "0.0.1", "how": "is gone"}', "word/2": "\x1b[2J", "word/3": "[]", "ended": "0"}
        forged |= {"view/1": '{"generation": 1, "members": ["6.6.6"]}', "folder": '["/", "x"]', "why": "because"}
        for key, text in (forged | {"report/1/0.1.1": "{}", "candidate-number/1": "6.6.6"}).items():
            keys.set(key, text)
        for counter, number in {"words": 3, "word-numbers": 3, "candidates": 1, "reports/7": 1}.items():
            keys.add(counter, number)
        assert board.agree_shape(1, 2) == (1, 2)
        keys.set("view/1", keys.get("view/0"))  # a true one, of another key
        membership = Membership(PrefixStore(board.prefix, own), "0.0.1", secret=secret_of(board.prefix))
        started = membership.begin(["0.0.1", "0.1.1"])
        assert (board.new_words(), board.ended(), board.folder(), board.why()) == ([], None, None, "")
        assert (board.candidates(), membership.gone(), membership.lost(started)) == ([], {}, "")
        assert [view.members for view in board.new_views()] == [("0.0.1", "0.1.1")]
        assert (has_ended(own), membership.is_left_out(), membership.wishes()) == (False, False, False)

        board.tell_gone("0.1.1", "was killed by SIGKILL")
        keys.set("word/5", keys.get("word/4"))
        keys.add("word-numbers", 1)
        keys.add("words", 1)
        assert membership.gone() == {"0.1.1": "was killed by SIGKILL"}
        assert board.new_words() == [Word("0.1.1", "was killed by SIGKILL")]
        assert membership.regroup(started, Report(member="0.0.1", position=3))[0].members == ("0.0.1",)
        assert [view.members for view in board.new_views()] == [("0.0.1",)]
        board.end(1, "no rank is left")
        board.end(0, "")
        assert (board.ended(), board.why(), has_ended(own)) == (1, "no rank is left", True)
        assert process.poll() is None
        says(caplog.text)
        assert {record.levelname for record in caplog.records} == {"WARNING"}
        monkeypatch.setenv("DISTACCUM_TOKEN", "another")
        with pytest.raises(ConfigError, match="DISTACCUM_TOKEN: another token, or none, has signed what is in"):
            Board(own).agree_shape(1, 2)


def test_the_store_of_one_node_listens_on_the_loopback() -> None:
    process = start_store(0, alone=True)
    try:
        port = port_of(process, 0)
        assert TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False).add("a", 1) == 1
        listening = {line.split()[1] for line in _sockets() if f":{port:04X} 00000000" in line}
        assert listening == {f"0100007F:{port:04X}"}
    finally:
        process.kill()
        process.wait()


def _sockets() -> list[str]:
    """The machine's, of both families: address and port in hexadecimal."""
    files = [Path("/proc/net") / name for name in ("tcp", "tcp6")]
    return [line for file in files if file.exists() for line in file.read_text().splitlines() if " 0A " in line]
