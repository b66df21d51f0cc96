"""What a collective sends, and how long it takes.

A message costs ``alpha + B / beta`` seconds: a latency, and B bytes over a bandwidth (R. Hockney, "The communication
challenge for MPP: Intel Paragon and Meiko CS-2", 1994).

Collectives of B bytes among N ranks (R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication
operations in MPICH", 2005; P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", 2009)::

    all-reduce, ring             2 (N - 1) (alpha + B / (N beta))
    all-reduce, binary tree      2 ceil(log2 N) (alpha + B / beta)     up to the root and down again; the faster one
    reduce-scatter, all-gather     (N - 1) (alpha + B / (N beta))      rings; a broadcast and a reduction likewise

A ring waits at each step for its slowest link, which is the one between nodes where there are two nodes or more. Rings
that leave a node at the same time share its link.
"""

from __future__ import annotations

from dataclasses import dataclass

KINDS = ("all-reduce", "reduce-scatter", "reduce", "all-gather", "broadcast", "all-to-all")
_ROUNDS = {"all-reduce": 2, "reduce-scatter": 1, "all-gather": 1, "broadcast": 1, "reduce": 1, "all-to-all": 1}


@dataclass(frozen=True, kw_only=True)
class Link:
    """A link: ``latency_s`` (seconds) of an empty message, and ``bytes_per_s`` of a long one."""

    latency_s: float
    bytes_per_s: float

    def shared(self, rings: int) -> Link:
        """The share of the link that one of ``rings`` has."""
        return Link(latency_s=self.latency_s, bytes_per_s=self.bytes_per_s / rings)


def ring_bytes(kind: str, payload: float, ranks: int) -> float:
    """Bytes that one of ``ranks`` sends in a ring collective of ``payload`` bytes, on average over the ranks.

    Of N parts a rank passes on N - 1 in a reduce-scatter, and the same number in an all-gather; an all-reduce is both,
    one after the other. In a broadcast or a reduction to one rank, all ranks but one pass on the whole payload. In an
    all-to-all, no ring, each has one part of it, and keeps a share of that.

    Raises:
        KeyError: the kind is not known.
    """
    return _ROUNDS[kind] * payload * (ranks - 1) / ranks / (ranks if kind == "all-to-all" else 1)


def ring_seconds(kind: str, payload: float, ranks: int, link: Link) -> float:
    """Seconds of a ring collective: each round passes on N - 1 parts, one message each.

    Raises:
        KeyError: the kind has no ring.
    """
    return _ROUNDS[kind] * (ranks - 1) * link.latency_s + ring_bytes(kind, payload, ranks) / link.bytes_per_s


def tree_seconds(payload: float, ranks: int, link: Link) -> float:
    """Seconds of an all-reduce that sends the whole payload up a binary tree, and down again."""
    return 2 * (ranks - 1).bit_length() * (link.latency_s + payload / link.bytes_per_s)


def seconds(kind: str, payload: float, ranks: int, link: Link) -> float:
    """Seconds of the faster of ring and tree; 0 on one rank, or with nothing to send."""
    if ranks == 1 or not payload:
        return 0.0
    ring = ring_seconds(kind, payload, ranks, link)
    return min(ring, tree_seconds(payload, ranks, link)) if kind == "all-reduce" else ring
