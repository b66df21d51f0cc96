"""Ranks agree on a job, or learn which of them does not come."""

from __future__ import annotations

import logging
import math
import os
from concurrent.futures import ThreadPoolExecutor
from time import sleep

import pytest
from torch.distributed import HashStore

from distaccum.distributed.environment import LaunchEnvironment
from distaccum.errors import PeerError
from distaccum.train import coordination
from distaccum.train.coordination import Job, JobCoordinator, JobRejectedError

JOB = Job(number=0, run_dir="run", config={})


def _ranks(size: int) -> list[JobCoordinator]:
    store = HashStore()
    return [JobCoordinator(LaunchEnvironment(rank=rank, size=size, launched=True), store) for rank in range(size)]


def test_one_that_cannot_run_it_rejects_it_for_all() -> None:
    ranks = _ranks(3)

    def agree(rank: int) -> str:
        with pytest.raises(JobRejectedError) as rejected:
            ranks[rank].agree(JOB, "no such file" if rank == 1 else None, within_s=20)
        return str(rejected.value)

    with ThreadPoolExecutor(3) as pool:
        assert [*pool.map(agree, range(3))] == ["no such file"] * 3


@pytest.mark.parametrize("late", [0, 2])
def test_one_that_does_not_come_is_named(
    late: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(coordination, "_FIRST_WORD_S", 0.1)
    ranks = _ranks(3)

    def agree(rank: int) -> str:
        with pytest.raises((PeerError, JobRejectedError)) as ended:
            ranks[rank].agree(JOB, None, within_s=0.5)
        return str(ended.value)

    with caplog.at_level(logging.WARNING, "distaccum"), ThreadPoolExecutor(2) as pool:
        said = [*pool.map(agree, [rank for rank in range(3) if rank != late])]
    for text in said:
        assert text.startswith(f"rank {late} (process {os.getpid()} on ")
        assert ") is not ready to train 0 s after rank " in text or ") is not ready to train 1 s after rank " in text
    assert any("after 0 s the run ends (trainer.hang_timeout)" in record.getMessage() for record in caplog.records)


def test_one_that_is_late_is_awaited_where_nothing_limits_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(coordination, "_FIRST_WORD_S", 0.1)
    ranks = _ranks(2)

    def agree(rank: int) -> None:
        sleep(0.4 * rank)
        ranks[rank].agree(JOB, None, within_s=math.inf)

    with caplog.at_level(logging.WARNING, "distaccum"), ThreadPoolExecutor(2) as pool:
        list(pool.map(agree, range(2)))
    assert "is not ready to train 0 s after rank 0 was; the run waits for it (trainer.hang_timeout)" in caplog.text
