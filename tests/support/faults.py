"""The table of faults in docs/reliability.md, made of the tests that inject them.

A test that injects one carries ``@pytest.mark.fault(FAULT, group=..., does=..., says=...)``: what the run does and what
a person reads; ``says`` is one quote or several, in which ``...`` stands for anything. The fixture ``says`` of such a
test asserts that a text has the quotes, so that the table's words are what was printed. ::

    python -m tests.support.faults          # writes the table
    python -m tests.support.faults --check  # exit code 1 where it is not what the tests say
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
BEGIN, END = "<!-- faults: made by python -m tests.support.faults -->", "<!-- faults end -->"
GROUPS = {
    "checkpoints": "Checkpoints and resuming",
    "directory": "The run directory",
    "processes": "Processes that die, stop or wait",
    "signals": "Signals and the time limit",
    "numbers": "Numbers",
    "settings": "Settings, model and data",
    "services": "Weights & Biases",
}


@dataclass(frozen=True, order=True)
class Fault:
    """A row of the table, and the tests that show it."""

    group: str
    name: str
    does: str
    says: tuple[str, ...]

    @classmethod
    def of(cls, marker: pytest.Mark) -> Fault:
        """The row that a marker states.

        Raises:
            TypeError: a part is missing or unknown, or the group is none of :data:`GROUPS`.
        """
        (name,), kwargs = marker.args, dict(marker.kwargs)
        says = kwargs.pop("says", ())
        fault = cls(name=name, says=(says,) if isinstance(says, str) else tuple(says), **kwargs)
        if fault.group not in GROUPS:
            raise TypeError(f"group={fault.group!r} of {name!r}: take one of {', '.join(GROUPS)}")
        return fault


def has(quote: str, text: str) -> bool:
    """Whether a text has the quote; white space of any length is one space, and ``...`` anything."""
    parts = (re.escape(" ".join(part.split())) for part in quote.split("..."))
    return re.search(".*?".join(parts), " ".join(text.split())) is not None


@pytest.fixture
def says(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Asserts that a text has what the test's fault says."""
    marker = request.node.get_closest_marker("fault")
    assert marker is not None, "mark the test with pytest.mark.fault"
    quotes = Fault.of(marker).says

    def check(text: str) -> None:
        missing = [quote for quote in quotes if not has(quote, text)]
        assert not missing, f"{missing} not in:\n{text}"

    return check


class _Collected:
    """A pytest plugin that keeps the faults of what is collected."""

    def __init__(self) -> None:
        self.faults: dict[Fault, list[str]] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            for marker in item.iter_markers("fault"):
                tests = self.faults.setdefault(Fault.of(marker), [])
                name = item.nodeid.split("[")[0]
                if name not in tests:
                    tests.append(name)


def table(faults: dict[Fault, list[str]]) -> str:
    """The Markdown of the faults, by group."""
    lines = []
    for group, title in GROUPS.items():
        rows = sorted((fault, tests) for fault, tests in faults.items() if fault.group == group)
        if rows:
            lines += [f"### {title}", "", "| fault | what the run does | what a person reads |", "|---|---|---|"]
            for fault, _ in rows:
                quotes = "; ".join(f"`{quote}`" for quote in fault.says)
                lines.append(f"| {fault.name} | {fault.does} | {quotes} |")
            lines.append("")
    return "\n".join(lines)


def main() -> int:
    collected = _Collected()
    files = [str(file) for file in sorted(Path("tests").rglob("test_*.py")) if "mark.fault(" in file.read_text()]
    if code := pytest.main([*files, "--collect-only", "--no-summary", "-qq", "-m", ""], plugins=[collected]):
        return int(code)
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    made = f"{before}{BEGIN}\n\n{table(collected.faults)}\n{END}{rest.split(END)[1]}"
    if "--check" in sys.argv:
        return int(made != text)
    PAGE.write_text(made)
    print(f"{len(collected.faults)} faults")
    return 0


if __name__ == "__main__":
    sys.exit(main())
