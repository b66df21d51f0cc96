"""What a collective sends, and how long it takes; formulas and sources in the room's docstring."""

from __future__ import annotations

from dataclasses import dataclass

KINDS = ("all-reduce", "reduce-scatter", "reduce", "all-gather", "broadcast")
_ROUNDS = {"all-reduce": 2, "reduce-scatter": 1, "all-gather": 1, "broadcast": 1, "reduce": 1}


@dataclass(frozen=True, kw_only=True)
class Link:
    """``latency_s`` (seconds) of a message of no length, and ``bytes_per_s`` of a long one."""

    latency_s: float
    bytes_per_s: float

    def shared(self, rings: int) -> Link:
        """What one of several rings has of it."""
        return Link(latency_s=self.latency_s, bytes_per_s=self.bytes_per_s / rings)


def ring_bytes(kind: str, payload: float, ranks: int) -> float:
    """What one of ``ranks`` sends in a ring collective of ``payload`` bytes, on average over the ranks.

    Of N parts a rank passes on N - 1 in a reduce-scatter, and as many in an all-gather; an all-reduce is both, one
    after the other. In a broadcast or a reduction to one rank all but one of the ranks pass the whole on.

    Raises:
        KeyError: of a kind that has no ring.
    """
    return _ROUNDS[kind] * payload * (ranks - 1) / ranks


def ring_seconds(kind: str, payload: float, ranks: int, link: Link) -> float:
    """A round passes N - 1 parts on, one message each.

    Raises:
        KeyError: of a kind that has no ring.
    """
    return _ROUNDS[kind] * (ranks - 1) * link.latency_s + ring_bytes(kind, payload, ranks) / link.bytes_per_s


def tree_seconds(payload: float, ranks: int, link: Link) -> float:
    """An all-reduce: the whole payload up a binary tree, and down again."""
    return 2 * (ranks - 1).bit_length() * (link.latency_s + payload / link.bytes_per_s)


def seconds(kind: str, payload: float, ranks: int, link: Link) -> float:
    """The faster of ring and tree; alone, or with nothing to send, no time."""
    if ranks == 1 or not payload:
        return 0.0
    ring = ring_seconds(kind, payload, ranks, link)
    return min(ring, tree_seconds(payload, ranks, link)) if kind == "all-reduce" else ring
