"""Fixtures for all tests."""

from __future__ import annotations

import sys

pytest_plugins = ["distaccum.testing.fixtures", "tests.support.faults"]


def pytest_runtest_setup() -> None:
    """Keeps absl, which Keras imports, from closing what pytest captures: Hydra closes all known handlers of logs."""
    absl = sys.modules.get("absl.logging")
    if absl is not None:
        absl.get_absl_handler().python_handler.stream = sys.__stderr__
