"""What an audit found, as values and in words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from distaccum.tools.audit.causes import Cause


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One window's gradient, before its clipping, beside the global batch's in fp64.

    Attributes:
        window: its number, from 1.
        factor: the length of the gradient along the right one, over that one's: 1 is right.
        cosine: of the angle between the two.
        error: the norm of the difference over the norm of the right gradient.
        tolerance: of ``error``, by the loop's number format.
        right: whether it is the global batch's gradient.
        causes: the likely ones; empty where it is right.
        micro_batches: of each rank.
        counts: of each rank.
        notes: what else was seen.
    """

    window: int
    factor: float
    cosine: float
    error: float
    tolerance: float
    right: bool
    causes: tuple[Cause, ...]
    micro_batches: tuple[int, ...]
    counts: tuple[float, ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        """A line of figures, and two for each cause."""
        return self.text()

    def text(self, *, like: Finding | None = None) -> str:
        """As ``str``; causes that ``like`` has by the same names are not repeated."""
        verdict = "right" if self.right else "WRONG"
        shape = " + ".join(f"{n} ({count:g})" for n, count in zip(self.micro_batches, self.counts, strict=True))
        figures = f"factor {self.factor:.6g}  cosine {self.cosine:.8f}  relative error {self.error:.2g}"
        lines = [f"window {self.window}: {verdict}  {figures}  micro-batches (counted) by rank: {shape}"]
        for cause in self.causes:
            if like is not None and cause.name in {other.name for other in like.causes}:
                lines.append(f"  cause: {cause.name}, as in window {like.window}")
            else:
                lines += [f"  cause: {cause.words}", f"  write: {cause.remedy}"]
        return "\n".join([*lines, *(f"  note:  {note}" for note in self.notes)])


@dataclass
class Report:
    """Filled when the audited block ends; the same on every rank.

    Attributes:
        findings: one for each audited window.
        notes: on the audit as a whole.
        ranks: the world size.
        record: within the block, ``report.record(batch)`` says what batch the next training forward takes; needed where
            neither a loader nor the forward's inputs give it.
    """

    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    ranks: int = 1
    record: Callable[[Any], None] | None = None

    @property
    def right(self) -> bool:
        """Whether every audited window's gradient is the global batch's.

        False before the block has ended.
        """
        return bool(self.findings) and all(finding.right for finding in self.findings)

    @property
    def causes(self) -> tuple[Cause, ...]:
        """Those of all windows, each name once."""
        return tuple({cause.name: cause for finding in self.findings for cause in finding.causes}.values())

    def __str__(self) -> str:
        """The whole report."""
        if not self.findings:
            return "distaccum audit: nothing audited yet"
        wrong = [finding for finding in self.findings if not finding.right]
        verdict = (
            f"this loop's gradient is NOT the global batch's in {len(wrong)} of {len(self.findings)} windows"
            if wrong
            else "this loop's gradient is the global batch's"
        )
        head = f"distaccum audit: {verdict} ({self.ranks} rank{'s' if self.ranks > 1 else ''})"
        first = wrong[0] if wrong else None
        texts = [finding.text(like=None if finding is first else first) for finding in self.findings]
        return "\n".join([head, *texts, *(f"note: {note}" for note in self.notes)])
