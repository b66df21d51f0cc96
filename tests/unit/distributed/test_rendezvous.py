"""Ranks find each other in a store that other ranks have used before them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from time import sleep

import pytest
from torch.distributed import HashStore, Store, TCPStore

from distaccum.distributed import environment
from distaccum.distributed.environment import private_store

SIZE = 3


def _meet(connect: Callable[[], Store], *, last: int) -> list[str]:
    """All ranks at once, one of them late; each then writes what nobody else may, and reads what rank 0 has written."""

    def rank(number: int) -> str:
        sleep(0.2 * (number == last))
        part = private_store(connect(), number, SIZE, timeout_s=20)
        if number == 0:
            part.set("job", f"by the set whose last was {last}")
        return str(part.get("job").decode())

    with ThreadPoolExecutor(SIZE) as pool:
        return [*pool.map(rank, range(SIZE))]


@pytest.mark.parametrize("kind", ["in memory", "of torchrun's kind"])
def test_each_set_of_ranks_reads_its_own_notes(kind: str) -> None:
    timeout = timedelta(seconds=30)
    shared, server = HashStore(), TCPStore("127.0.0.1", 0, is_master=True, timeout=timeout)

    def connect() -> Store:  # over the network every rank has a connection of its own
        return shared if kind == "in memory" else TCPStore("127.0.0.1", server.port, timeout=timeout)

    for last in (0, 1, 2, 0):  # the second time on, words and notes of ranks before them are there
        assert _meet(connect, last=last) == [f"by the set whose last was {last}"] * SIZE


def test_a_rank_that_does_not_come_is_told_of_before_the_time_is_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(environment, "_FIRST_WORD_S", 0.05)
    with caplog.at_level("WARNING", "distaccum"), pytest.raises(TimeoutError):
        private_store(HashStore(), 0, 3, timeout_s=0.3)
    assert [record.getMessage()[:32] for record in caplog.records] == ["ranks [1, 2] have not come after"] * 3


def test_a_word_of_a_rank_before_is_not_taken_for_the_rank() -> None:
    store = HashStore()
    store.set("meeting/1", "stale")
    with pytest.raises(TimeoutError, match=r"ranks \[1\] have not come"):
        private_store(store, 0, 2, timeout_s=0.2)


def test_alone_there_is_nobody_to_wait_for() -> None:
    part = private_store(HashStore(), 0, 1, timeout_s=0.1)
    part.set("a", "b")
    assert part.get("a") == b"b"
