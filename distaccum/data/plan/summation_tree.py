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
def _above(blocks: int) -> dict[Node, tuple[Node, Node]]:
    """The other half of each node but the root, and the node that both make."""
    found = dict[Node, tuple[Node, Node]]()
    for node in _inner((0, blocks)):
        left, right = halves(node)
        found[left], found[right] = (right, node), (left, node)
    return found


def joined(
    blocks: int, held: Sequence[Node], computed: Sequence[int]
) -> tuple[Sequence[Node], Sequence[Sequence[Node]]]:
    """What is left of sums that are ``held`` and of blocks that are ``computed`` one after the other.

    Two halves of a node are added as soon as both are there.

    Returns:
        The nodes that are left, in order, which for neighbouring blocks are those of :func:`nodes_within`; and for each
        computed block the sums that are added to it, one after the other.
    """
    above, there, added = _above(blocks), set(held), list[Sequence[Node]]()
    for block in computed:
        node, halves_of_it = (block, block + 1), list[Node]()
        while node in above and above[node][0] in there:
            other, node = above[node]
            there.remove(other)
            halves_of_it.append(other)
        there.add(node)
        added.append(halves_of_it)
    return sorted(there), added


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
