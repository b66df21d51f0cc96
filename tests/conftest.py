"""Fixtures for all tests."""

pytest_plugins = ["distaccum.testing.fixtures", "tests.support.faults"]
