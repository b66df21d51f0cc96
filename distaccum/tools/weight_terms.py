"""Whether a term of the weights alone, as a penalty, is added once for each micro-batch beside a sum over samples.

Its gradient is then divided by the count of the window and added as often as there are micro-batches. Nobody runs a
loop's loss on other samples, so the graph is asked: what such a term is multiplied by, in each micro-batch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from math import isclose
from typing import Any

MANY = 3  # digits: no factor that people write
_MOST, _PAIR = 4096, 2  # nodes that are looked at; samples
_LEAF = "torch::autograd::AccumulateGrad"
_JOINED = r"(Add|Sub|Rsub|Mul|Div|Maximum|Minimum|Dot)Backward\d"  # with a number or a constant, perhaps
_ELEMENTS = (
    r"(Pow|Sqrt|Rsqrt|Abs|Exp|Log\w*|Softplus|Sigmoid|Relu|Tanh|Neg|Reciprocal|Clamp\w*|ToCopy|Clone|Alias|\w*View|"
    r"T|Transpose|Permute|Squeeze|Unsqueeze|Select|Slice|Unbind|Diagonal\w*|Trace|Sum|Mean|Prod|Var|Std|Norm|Linalg\w*)"
    r"Backward\d"
)
_OF_SEVERAL = r"(Mm|Bmm|Mv|Stack|Cat)Backward\d"  # all of which are weights
_ROUND = "152"  # first digits, from the roundest on


def constants_of_weights(root: Any) -> frozenset[int] | None:
    """Of what is computed of weights alone, the sizes of constants in it, which may be samples; None of all else."""
    sizes, left, seen = set[int](), [root], set[Any]()
    while left and len(seen) < _MOST:
        node = left.pop()
        if node in seen:
            continue
        seen.add(node)
        name, given = node.name(), [one for one, _ in node.next_functions]
        if name != _LEAF and not re.fullmatch(f"{_JOINED}|{_ELEMENTS}|{_OF_SEVERAL}", name):
            return None
        if None in given and re.fullmatch(_OF_SEVERAL, name):
            return None
        if None in given:
            sizes.update(map(int, node._input_metadata[0].shape))
        left += [one for one in given if one is not None]
    return None if left else frozenset(sizes)


def added_once(found: Sequence[tuple[str, float, float, bool]]) -> str:
    """In words, such a term that the micro-batches of a window add once each; empty where there is none.

    Args:
        found: of each micro-batch, on all ranks: the loss's name, its count, the factor of the term in it, and whether
            the count is in that.
    """
    for name in dict.fromkeys(name for name, *_ in found):
        each = [one for other, *one in found if other == name]
        counts, factors = [count for count, *_ in each], [abs(factor) for _, factor, _ in each]
        if len(each) < _PAIR or not all(factors) or all(multiplied for *_, multiplied in each):
            continue
        if _alike(factor / count for count, factor in zip(counts, factors, strict=True)):
            once = min(counts) >= _PAIR and factors[0] < counts[0] and _is_written(factors[0], factors[0] / counts[0])
            once = once and _alike(counts)
        else:
            of_window = sum(factors) / sum(counts)  # which may be what was meant, as where it is shared out
            once = _alike(factors) and digits(of_window) >= digits(factors[0])
        if once:
            of = "" if name == "loss" else f" {name!r}"
            return (
                f"a term of the weights alone is added to the loss{of} once for each micro-batch, times "
                f"{factors[0]:g}, and not for each of its {max(counts):g}: the gradient depends on the number of "
                "micro-batches. Multiply it by the micro-batch's count, or use weight_decay of the optimizer"
            )
    return ""


def _is_written(factor: float, of_each: float) -> bool:
    """Whether a factor is what a person writes, and not what a person writes times a count."""
    own, other = digits(factor), digits(of_each)
    if own != other or own == MANY:
        return own < other
    ranks = [_ROUND.find(f"{number:e}"[0]) % (len(_ROUND) + 1) for number in (factor, of_each)]
    return ranks[0] <= ranks[1]


def _alike(numbers: Iterable[float]) -> bool:
    first, *others = numbers
    return all(close(first, other) for other in others)


def digits(number: float) -> int:
    """How many a number has: people write the weight of a loss with one or two, and not that times a count."""
    return next((many for many in (1, 2) if close(float(f"{number:.{many}g}"), number)), MANY)


def close(a: float, b: float) -> bool:
    """But for the rounding of sums in fp32."""
    return isclose(a, b, rel_tol=1e-5)
