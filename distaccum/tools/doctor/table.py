"""What was found, as people read it and as programs do: the same facts in both."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from textwrap import wrap
from typing import Any

import distaccum
from distaccum.errors import shorten
from distaccum.tools.doctor.facts import Finding, Look
from distaccum.tools.doctor.limits import NO_ANSWER, UNSEEN

_INDENT, _GAP, _NAME = 2, 2, 28
_VALUES = 4  # that differ between nodes and are shown; --json has all
_COMMENT = "    # "
_TITLE, _WRONG, _NOTE, _MEND = "bold", "bold red", "yellow", "cyan"


@dataclass(frozen=True, kw_only=True)
class Section:
    """What one probe has found on each node, by the node's name; by ``""`` what is of all of them."""

    title: str
    looks: Mapping[str, Look]


@dataclass(frozen=True, kw_only=True)
class Examination:
    """Everything."""

    nodes: Mapping[str, Sequence[int]]
    sections: Sequence[Section]

    @property
    def ranks(self) -> int:
        """How many there are."""
        return sum(map(len, self.nodes.values()))

    def findings(self) -> dict[Finding, list[str]]:
        """Each finding, and the nodes that it was made on; what is wrong first."""
        found: dict[Finding, list[str]] = {}
        for section in self.sections:
            for node, look in section.looks.items():
                for one in look.findings:
                    where = found.setdefault(one, [])
                    if node and node not in where:
                        where.append(node)
        return dict(sorted(found.items(), key=lambda item: not item[0].wrong))

    @property
    def right(self) -> bool:
        """Whether nothing is wrong; notes do not count."""
        return not any(one.wrong for one in self.findings())

    def unseen(self) -> int:
        """How many things could not be looked at."""
        facts = (fact for section in self.sections for look in section.looks.values() for fact in look.facts)
        return sum(fact.text.startswith((UNSEEN, NO_ANSWER)) for fact in facts)

    def to_json(self) -> dict[str, Any]:
        """Of JSON's types."""
        return {
            "distaccum": distaccum.__version__,
            "right": self.right,
            "ranks": self.ranks,
            "nodes": {name: list(ranks) for name, ranks in self.nodes.items()},
            "sections": [
                {
                    "title": section.title,
                    "nodes": {node: [asdict(f) for f in look.facts] for node, look in section.looks.items()},
                }
                for section in self.sections
            ],
            "findings": [asdict(one) | {"nodes": where} for one, where in self.findings().items()],
            "unseen": self.unseen(),
        }


def show(examination: Examination) -> None:
    """Prints it: wrapped and with colours on a terminal, one line a fact elsewhere."""
    from rich.console import Console  # noqa: PLC0415  as heavy as all the rest
    from rich.text import Text  # noqa: PLC0415

    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal without UTF-8 has no µ
    console = Console(highlight=False, markup=False, emoji=False)
    for style, line in lines(examination, console.width if console.is_terminal else None):
        console.print(Text(line, style=style), soft_wrap=True)


def lines(examination: Examination, width: int | None) -> Iterator[tuple[str, str]]:
    """A style and a text for each line.

    Args:
        examination: what to show.
        width: of the terminal, in characters; None where nothing is wrapped.
    """
    count, there = examination.ranks, len(examination.nodes)
    who = f"{count} rank{'s' * (count > 1)} on {there} node{'s' * (there > 1)}"
    yield _TITLE, f"distaccum doctor: {who}"
    for section in examination.sections:
        if not any(look.facts for look in section.looks.values()):
            continue
        yield "", ""
        yield _TITLE, section.title
        for name, text in _rows(section):
            for line in _row(name, text, width):
                yield "", line
    findings = examination.findings()
    for wrong, title, style in ((True, "Wrong", _WRONG), (False, "Notes", _NOTE)):
        chosen = [(one, where) for one, where in findings.items() if one.wrong is wrong]
        if chosen:
            yield "", ""
            yield style, f"{title} ({len(chosen)})"
        for number, (one, where) in enumerate(chosen, 1):
            on = f" (on {shorten(where)})" if there > 1 and where else ""
            for line in _row(str(number), f"{one.what}{on}", width, name_width=3):
                yield "", line
            for line in _mend(one.mend, width):
                yield _MEND, line
    yield "", ""
    unseen = examination.unseen()
    blind = f" {unseen} thing{'s' * (unseen > 1)} could not be looked at." if unseen else ""
    if examination.right:
        yield _TITLE, f"Nothing that was looked at is wrong.{blind}"
    else:
        yield _WRONG, f"{sum(one.wrong for one in findings)} wrong.{blind}"


def _rows(section: Section) -> Iterator[tuple[str, str]]:
    """Names and texts; what all nodes have in common once."""
    names = dict.fromkeys(fact.name for look in section.looks.values() for fact in look.facts)
    for name in names:
        held: dict[str, list[str]] = {}
        for node, look in section.looks.items():
            texts = [fact.text for fact in look.facts if fact.name == name]
            held.setdefault("; ".join(texts) or "none", []).append(node)
        if len(held) == 1:
            yield name, next(iter(held))
            continue
        for number, (text, where) in enumerate(held.items()):
            if number == _VALUES:
                yield "", f"{len(held) - _VALUES} more: see --json"
                break
            yield name if number == 0 else "", f"{shorten(where, 3)}: {text}"


def _mend(mend: str, width: int | None) -> Iterator[str]:
    """A command is not wrapped, so that it can be copied; what is said of it stands below, where it has no place."""
    start = f"{'':{_INDENT + 3 + _GAP}}-> "
    command, _, comment = mend.partition(_COMMENT)
    if width is None or not comment or len(start) + len(mend) <= width:
        yield f"{start}{mend}"
        return
    yield f"{start}{command}"
    for line in wrap(comment, max(20, width - len(start) - 2), break_on_hyphens=False):
        yield f"{'':{len(start)}}# {line}"


def _row(name: str, text: str, width: int | None, *, name_width: int = _NAME) -> Iterator[str]:
    start = f"{'':{_INDENT}}{name:<{name_width}}{'':{_GAP}}"
    if width is None:
        yield f"{start}{text}".rstrip()
        return
    left = max(20, width - _INDENT - name_width - _GAP)
    for number, line in enumerate(wrap(text, left, break_on_hyphens=False) or [""]):
        yield f"{start if number == 0 else ' ' * (_INDENT + max(name_width, len(name)) + _GAP)}{line}"
