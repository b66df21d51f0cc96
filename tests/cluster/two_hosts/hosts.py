"""Two hosts for tests: those of ``launch/bench/network/hosts.py``, or a reason to skip."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch import python_path
from launch.bench.network.hosts import Finished, Hosts, obstacle, torchrun, two_hosts
from tests.support.commands import TRAIN


def need_hosts() -> None:
    """Skips where this machine cannot have two hosts, or fails with DISTACCUM_REQUIRE_TOOLS."""
    reason = obstacle()
    if reason is None:
        return
    if os.environ.get("DISTACCUM_REQUIRE_TOOLS"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """Two hosts with a link of 1 Gbit/s."""
    need_hosts()
    with two_hosts(mbit=1000) as made:
        yield made


def succeed_on(hosts: Hosts, *arguments: object, script: Path = TRAIN, timeout: float = 120) -> list[Finished]:
    """torchrun with one process on each host, which must exit with 0."""
    program = [str(script), *map(str, arguments)]
    finished = torchrun(hosts, program, timeout=timeout, environment=python_path())
    for one in finished:
        assert one.returncode == 0, one.stdout + one.stderr
    return finished
