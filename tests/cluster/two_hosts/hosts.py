"""Two hosts for tests: those of ``launch/link_hosts.py``, or a reason to skip."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.commands import ROOT, TRAIN

sys.path.insert(0, str(ROOT / "launch"))
from link_hosts import Finished, Hosts, obstacle, torchrun, two_hosts


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
    finished = torchrun(hosts, script, [str(argument) for argument in arguments], timeout=timeout)
    for one in finished:
        assert one.returncode == 0, one.stdout + one.stderr
    return finished
