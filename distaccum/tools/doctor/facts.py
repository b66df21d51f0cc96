"""What a probe has found: facts, which are told, and findings, which are to be mended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Fact:
    """One row: ``text`` as people read it, ``value`` as programs do (of JSON's types, in units that ``name`` says)."""

    name: str
    text: str
    value: Any = None


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What is wrong, in one line, and what mends it, as a person types it.

    With ``wrong=False`` it is a note: training works, and might be faster, safer or easier to follow.
    """

    what: str
    mend: str
    wrong: bool = True


@dataclass
class Look:
    """What one probe has found in one place."""

    facts: list[Fact] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    def tell(self, name: str, text: str, value: Any = None) -> None:
        """Adds a fact; its value is its text where none is given."""
        self.facts.append(Fact(name=name, text=text, value=text if value is None else value))

    def find(self, what: str, mend: str, *, wrong: bool = True) -> None:
        """Adds a finding."""
        self.findings.append(Finding(what=what, mend=mend, wrong=wrong))

    def value(self, name: str) -> Any:
        """The value of the fact of this name; None if there is none."""
        return next((fact.value for fact in self.facts if fact.name == name), None)

    def to_json(self) -> dict[str, Any]:
        """Of JSON's types."""
        return asdict(self)

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Look:
        """The inverse of :meth:`to_json`."""
        return cls([Fact(**fact) for fact in given["facts"]], [Finding(**one) for one in given["findings"]])


def seconds(duration: float) -> str:
    """A duration as people read it: ``"1.5 ms"``."""
    for factor, unit in ((1, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(duration) >= factor or unit == "µs":
            break
    return f"{duration / factor:.3g} {unit}"


def rate(bits: float) -> str:
    """Bits a second as networks are sold: ``"10 Gbit/s"``."""
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"  # noqa: PLR2004
