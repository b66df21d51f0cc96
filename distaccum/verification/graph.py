"""The graph of a loss."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor


def leaves_of(loss: Tensor) -> Iterator[Tensor]:
    """The leaves of a graph that need a gradient: one walk over its nodes."""
    waiting = [loss.grad_fn]
    seen = {loss.grad_fn}
    while waiting:
        node = waiting.pop()
        if node is None:
            continue
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor):
            yield leaf
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
