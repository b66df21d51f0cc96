"""On a pretended GPU: ``python -m launch.pretend train OVERRIDES``, ``pytest ARGUMENTS`` or ``compare FILE``.

``pytest -m gpu tests/gpu`` runs the tests of a GPU; each one's operators have to be in order on their streams.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

from launch import pretend


class Plugin:
    """Of pytest."""

    def pytest_configure(self, config: pytest.Config) -> None:
        config.addinivalue_line("filterwarnings", "ignore:Accessing the data pointer of FakeTensor")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self) -> Iterator[object]:
        with pretend.use():
            return (yield)

    @pytest.fixture(autouse=True)
    def no_races(self) -> Iterator[None]:
        pretend.STATE.forget()
        yield
        assert not pretend.STATE.races, pretend.STATE.races[:3]


def main() -> None:
    what, *arguments = sys.argv[1:]
    if what == "pytest":
        code = pytest.main(arguments, plugins=[Plugin()])
        sys.stdout.flush()
        os._exit(code)  # not through the end of the interpreter, with half of torch replaced
    if what == "compare":
        from launch.pretend.compare import main as compare  # noqa: PLC0415

        compare(*arguments)
        return
    from distaccum.train.__main__ import main as train  # noqa: PLC0415

    sys.argv[1:] = arguments
    with pretend.use():
        train()


if __name__ == "__main__":
    main()
