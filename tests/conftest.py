"""Fixtures for all tests."""

import gc
import os
import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile("no clock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("no clock")
# A run waits for the disk at each of thousands of small files. Whoever is killed leaves to the kernel what was written;
# only a machine that loses power tells the difference, which ``tests/simulation/disk.py`` stands in for.
os.fsync = lambda _: None

pytest_plugins = ["distaccum.testing.fixtures", "tests.support.faults"]


@pytest.fixture
def compiler() -> Iterator[None]:
    """torch.compile without what another test has compiled and captured."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts twelve other files after each of Slurm's: these wait, and side by side they leave the processors idle."""
    files = {item.path: item.path.parent.name == "slurm" for item in items}
    order = [file for file, waits in files.items() if not waits]
    for number, file in enumerate(file for file, waits in files.items() if waits):
        order.insert(13 * number, file)
    place = {file: number for number, file in enumerate(order)}
    items.sort(key=lambda item: place[item.path])


def pytest_collection_finish() -> None:
    """Searches for garbage would walk over thousands of tests; and no other machine writes here: nothing is late."""
    gc.freeze()
    if (files := sys.modules.get("distaccum.checkpoint.files")) is not None:
        files._LATE_S = ()  # type: ignore[attr-defined]


def pytest_runtest_setup() -> None:
    """Keeps absl, which Keras imports, from closing what pytest captures: Hydra closes all known handlers of logs."""
    absl = sys.modules.get("absl.logging")
    if absl is not None:
        absl.get_absl_handler().python_handler.stream = sys.__stderr__
