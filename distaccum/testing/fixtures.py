"""Pytest fixtures: list this module in ``pytest_plugins``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from distaccum.distributed.world import World
from distaccum.testing import single_process_world


@pytest.fixture
def gloo_world() -> Iterator[World]:
    """A :class:`World` over a gloo group of one; closed after the test, also when the test fails."""
    with single_process_world() as world:
        yield world
