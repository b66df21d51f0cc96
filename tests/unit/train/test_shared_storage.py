"""Ranks that do not share the run directory learn of it before the first window."""

from __future__ import annotations

from pathlib import Path

from distaccum.errors import ConfigError
from distaccum.train.run_dir import check_shared
from tests.support.threads import run_ranks


def test_a_folder_that_every_rank_sees(tmp_path: Path) -> None:
    assert run_ranks(3, lambda world: check_shared(tmp_path, world)) == [None] * 3
    assert list(tmp_path.iterdir()) == []


def test_folders_of_the_same_name_on_two_hosts(tmp_path: Path) -> None:
    hosts = [tmp_path / "host-0", tmp_path / "host-1"]
    hosts[0].mkdir()  # the other host's ranks have not even the folder
    raised = run_ranks(4, lambda world: check_shared(hosts[world.rank // 2], world))
    assert all(isinstance(error, ConfigError) for error in raised)
    for error in raised:
        assert "rank 2, rank 3 cannot see what rank 0 writes there" in str(error)
    assert list(hosts[0].iterdir()) == []
