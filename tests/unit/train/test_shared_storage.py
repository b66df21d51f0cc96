"""Ranks that do not share the run directory learn of it before the first window."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from distaccum.errors import ConfigError
from distaccum.train.shared_storage import check_shared
from tests.support.threads import run_ranks


def test_a_folder_that_every_rank_sees(tmp_path: Path) -> None:
    assert run_ranks(3, lambda world: check_shared(tmp_path, world)) == [None] * 3
    assert list(tmp_path.iterdir()) == []


@pytest.mark.fault(
    "ranks that do not share the run directory",
    group="directory",
    does="exit code 2, before the first window",
    says="rank 2, rank 3 cannot see what rank 0 writes there",
)
def test_folders_of_the_same_name_on_two_hosts(tmp_path: Path, says: Callable[[str], None]) -> None:
    hosts = [tmp_path / "host-0", tmp_path / "host-1"]
    hosts[0].mkdir()  # the other host's ranks have not even the folder
    raised = run_ranks(4, lambda world: check_shared(hosts[world.rank // 2], world))
    assert all(isinstance(error, ConfigError) for error in raised)
    for error in raised:
        says(str(error))
    assert list(hosts[0].iterdir()) == []
