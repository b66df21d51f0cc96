"""The faults that tests inject are rows of tables in docs/reliability.md: what a run does, and what a person reads.

A test that injects one carries ``@pytest.mark.fault(ROW)``, with the words that the row begins with. Its fixture
``says`` asserts that a text has the row's quotes, in which ``...`` stands for anything: so they are what is printed.
"""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"


@cache
def rows() -> dict[str, tuple[str, ...]]:
    """The faults of the tables, and the quotes of each."""
    tables = PAGE.read_text().split("<!-- faults")[1]
    cells = (row.rsplit(" | ", 2) for row in re.findall(r"^\| (.+) \|$", tables, re.MULTILINE))
    return {name: tuple(re.findall(r"`(.*?)`(?=; |$)", quotes)) for name, _, quotes in cells if name != "fault"}


def row_of(words: str) -> str:
    """The fault that has this name, or whose row alone begins with these words.

    Raises:
        ValueError: there is none, or there are several.
    """
    (found,) = [words] if words in rows() else [name for name in rows() if name.startswith(words)]
    return found


def has(quote: str, text: str) -> bool:
    """Whether a text has the quote; white space of any length is one space, and ``...`` anything."""
    parts = (re.escape(" ".join(part.split())) for part in quote.split("..."))
    return re.search(".*?".join(parts), " ".join(text.split())) is not None


@pytest.fixture
def says(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Asserts that a text has what the row of the test's fault quotes."""
    marker = request.node.get_closest_marker("fault")
    assert marker is not None, "mark the test with pytest.mark.fault"
    quotes = rows()[row_of(marker.args[0])]

    def check(text: str) -> None:
        missing = [quote for quote in quotes if not has(quote, text)]
        assert not missing, f"{missing} not in:\n{text}"

    return check
