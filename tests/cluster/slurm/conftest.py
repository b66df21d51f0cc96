"""The cluster that all tests here share."""

import os
import shutil
from collections.abc import Iterator
from getpass import getuser
from pathlib import Path
from tempfile import mkdtemp

import pytest

from tests.cluster.slurm.cluster import Cluster, missing_tools
from tests.cluster.slurm.runs import SETTINGS, submit


@pytest.fixture(scope="session")
def session_cluster() -> Iterator[Cluster]:
    """Two nodes of two CPUs each; without Slurm the tests are skipped, unless DISTACCUM_REQUIRE_TOOLS is set."""
    if missing := missing_tools():
        reason = f"needs {', '.join(missing)} (Debian: apt-get install slurm-wlm munge)"
        if os.environ.get("DISTACCUM_REQUIRE_TOOLS"):
            pytest.fail(reason)
        pytest.skip(reason)
    folder = Path(mkdtemp(prefix="slurm-"))  # pytest's own folders make paths too long for a socket
    try:
        with Cluster(folder) as running:
            yield running
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def cluster(session_cluster: Cluster) -> Iterator[Cluster]:
    """The cluster; jobs that a failed test leaves behind do not keep the next one waiting."""
    yield session_cluster
    session_cluster.scancel(f"--user={getuser()}")


@pytest.fixture(scope="session")
def whole(session_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a run on two nodes, one process each, that nothing interrupted."""
    run_dir = tmp_path_factory.mktemp("whole")
    job = submit(session_cluster, *SETTINGS, options=("--nodes=2",), RUN_DIR=str(run_dir))
    assert session_cluster.wait(job) == "COMPLETED", session_cluster.output(job)
    return run_dir
