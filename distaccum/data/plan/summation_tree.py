"""A binary tree over the blocks of a window: in which order their gradients are added, whoever has computed them.

Pure arithmetic, no torch, no state.

A node covers the blocks from its begin to before its end. It is the sum of two nodes, of which the left one covers the
largest power of two below its number of blocks; so on any number of ranks the same numbers are added in the same order.
Source of the form: the binary counter of pairwise summation, N. J. Higham, "The Accuracy of Floating Point Summation"
(1993), section 2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

Node = tuple[int, int]


@lru_cache(maxsize=4096)
def nodes_within(blocks: int, begin: int, end: int) -> Sequence[Node]:
    """The fewest nodes of the tree over ``blocks`` that cover those from ``begin`` to before ``end``, in order."""
    return list(_within((0, blocks), begin, end)) if end > begin else []


def _within(node: Node, begin: int, end: int) -> Iterator[Node]:
    if begin <= node[0] and node[1] <= end:
        yield node
    elif node[0] < end and begin < node[1]:
        for half in halves(node):
            yield from _within(half, begin, end)


@lru_cache(maxsize=4096)
def sums_after(blocks: int, begin: int, end: int) -> Sequence[int]:
    """Of blocks that are computed one after the other: how often the last two sums are added after each of them.

    What is left at the end are the sums of :func:`nodes_within`.
    """
    sums = [0] * (end - begin)
    for node in nodes_within(blocks, begin, end):
        for _, last in _inner(node):
            sums[last - 1 - begin] += 1
    return sums


def _inner(node: Node) -> Iterator[Node]:
    """The node and those below it that are sums."""
    if node[1] - node[0] > 1:
        for half in halves(node):
            yield from _inner(half)
        yield node


def halves(node: Node) -> tuple[Node, Node]:
    """The two nodes that a node of several blocks is the sum of."""
    begin, end = node
    middle = begin + (1 << ((end - begin - 1).bit_length() - 1))
    return (begin, middle), (middle, end)
