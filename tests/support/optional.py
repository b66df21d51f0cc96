"""Libraries of the extras, imported by the first test that uses one: collecting the tests imports none of them."""

from importlib.util import find_spec
from typing import Any

import pytest


class Library:
    """A module by its name. The test that asks it for something is skipped where it is not installed."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith(("_", "pytest")):  # as pytest asks of whatever a file of tests defines
            raise AttributeError(attribute)
        return getattr(pytest.importorskip(self._name), attribute)


def needs(*modules: str) -> pytest.MarkDecorator:
    """Skips a file whose tests start processes that import these modules."""
    missing = [module for module in modules if find_spec(module.partition(".")[0]) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")
