"""What a loss is the sum of, read from its graph: means and sums, and what they are multiplied and divided by."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from torch import Tensor, arange, float32

from distaccum.tools.weight_terms import close, constants_of_weights

_PAIR, _MOST = 2, 256  # samples; the nodes that are looked at
_TERMS = 4096  # nodes down to terms: a penalty of weights adds one for each parameter
_NONE, _MEAN, _SUM = 0, 1, 2  # torch's numbers of reductions
_KEEPS = r"(ToCopy|Clone|Alias|\w*View|Squeeze|Unsqueeze|NanToNum|Mean|Sum)Backward\d"  # the value of one element
_JOINS = r"(Stack|Cat|Index\w+|Scatter\w*|Segment\w*|Cumsum)Backward\d|.*Backward"  # rows, or nobody knows what
_REDUCES = r"(Sum|Mean|Logsumexp|Amax|Amin|Norm|\w*VectorNorm|\w*Loss\w*)Backward\d"
_SMOOTH = r"MaskedFillBackward\d NegBackward\d SumBackward\d (MulBackward\d )?LogSoftmaxBackward\d"
_LEAF = "torch::autograd::AccumulateGrad"
_LAYER = r"(Addmm|Mm|Bmm|Convolution|Embedding|\w*Loss\w*)Backward\d|torch::autograd::AccumulateGrad"


@dataclass(frozen=True, slots=True)
class Term:
    """A mean or a sum that a loss is made of, times ``factor``; of what is neither only the factor is known."""

    factor: float = 1.0
    divisors: tuple[float, ...] = ()  # in the factor
    multipliers: tuple[float, ...] = ()
    scale: float = 1.0  # in the factor, from fp32 tensors such as a loss scaler's
    kind: str = ""
    mean: bool = False
    items: float = 0.0  # that are reduced; torch counts labels by the weights of their classes
    shape: tuple[int, ...] = ()  # of what is reduced
    labels: bool = False
    of_samples: bool = False  # not of weights alone
    constants: frozenset[int] | None = None  # of a term of weights alone, the sizes of what else is in it
    whole: bool = False  # known to be of all samples, and not of one's own part
    length: float = 0.0  # that each row is divided by below the sum, where it is of labels or a mask; 0 of none
    padded: bool = False  # whether the mask's rows end before the longest of them
    logits: Any = None  # while the graph is read, the log-softmax that it is of
    layers: frozenset[Any] = frozenset()  # while the graph is read, those that all its rows come from

    def times(self, factor: float, *, divisor: float = 1.0, scale: float = 1.0) -> Term:
        divisors = self.divisors if divisor == 1.0 else (*self.divisors, divisor)
        by = self.multipliers if factor in (1, -1) else (*self.multipliers, abs(factor))
        scales = self.scale * scale
        return replace(self, factor=self.factor * factor / divisor, divisors=divisors, multipliers=by, scale=scales)


def terms_of(root: Any, count: float = 0.0) -> Sequence[Term]:
    """What a loss is the sum of, with the count of its micro-batch; empty where nobody knows."""
    with suppress(Exception):  # torch promises nothing of its nodes, and a number may be complex, or hidden by a mode
        terms = _unsmoothed(_read(root, count))
        return [replace(one, whole=_is_whole(one, terms), logits=None, layers=frozenset()) for one in terms]
    return []


def _read(root: Any, count: float) -> list[Term]:
    found, left = list[Term](), [(root, Term())]
    for _ in range(_TERMS):
        if not left or root is None:
            return found
        node, outer = left.pop()
        name, given = node.name(), _inputs(node)
        if name in ("AddBackward0", "SubBackward0"):
            second = node._saved_alpha * (1 if name == "AddBackward0" else -1)
            left += [(one, outer.times(second if i else 1)) for i, (one, _) in enumerate(node.next_functions) if one]
        elif name == "NegBackward0":
            left.append((given[0], outer.times(-1)))
        elif name == "WhereBackward0" and len(set(map(_same_value, given))) == 1:  # as ``from_mean`` gives it
            left.append((_same_value(given[0]), outer))
        elif (value := _same_value(node)) is not node:
            left.append((value, outer))
        elif name in ("MeanBackward0", "SumBackward0") and (pieces := _pieces(given[0])):
            left += [(one, outer.times(1, divisor=prod(_shape(given[0])) if name[0] == "M" else 1)) for one in pieces]
        elif len(given) == 1 and (by := _factor(node, name)):
            number, scales = float(by), isinstance(by, Tensor) and by.dtype is float32
            by_it = outer.times(1, divisor=number) if name[0] == "D" else outer.times(number, scale=number**scales)
            left.append((given[0], by_it))
        else:
            term = replace(_reduction(node, name, given, outer), constants=constants_of_weights(node))
            found.append(replace(term, layers=_layers(node, count)) if term.mean else term)
    return []


def _inputs(node: Any) -> list[Any]:
    return [one for one, _ in node.next_functions if one]


def _shape(node: Any) -> tuple[int, ...]:
    """Of what the node has computed in the forward."""
    return tuple(map(int, node._input_metadata[0].shape))


def _same_value(node: Any) -> Any:
    """The node that the one element of a 0-dim tensor comes from."""
    while re.fullmatch(_KEEPS, node.name()) and prod(_shape(_inputs(node)[0])) == 1:
        node = _inputs(node)[0]
    return node


def _pieces(node: Any) -> list[Any]:
    """The losses of one element each that are stacked or joined to a vector; empty where it is none of such."""
    found = _inputs(node) if re.fullmatch(r"(Stack|Cat)Backward\d", node.name()) else []
    return found if all(prod(_shape(one)) == 1 for one in found) else []


def _factor(node: Any, name: str) -> Any:
    """The one number, or tensor of one, that a loss is multiplied or divided by; None where it is none."""
    kind, of_other = re.sub(r"Backward\d$", "", name), node.next_functions[0][0] is not None
    return _saved(node, "other" if of_other else "self") if kind == "Mul" or (kind == "Div" and of_other) else None


def _saved(node: Any, name: str, *, whole: bool = False) -> Any:
    """A number, or a tensor of one, or of any size; None where a hook has it, which may compute a forward again."""
    if getattr(getattr(node, f"_raw_saved_{name}", None), "unpack_hook", None) is not None:
        return None
    kept = getattr(node, f"_saved_{name}")
    return kept if not isinstance(kept, Tensor) else kept.detach() if kept.numel() == 1 or whole else None


def _reduction(node: Any, name: str, given: Sequence[Any], outer: Term) -> Term:
    """The term that ends in a node: a loss function of torch's, a mean or a sum."""
    kind, reduction = re.sub(r"Backward\d*$", "", name), getattr(node, "_saved_reduction", None)
    one = reduction == _NONE and prod(_shape(node)) == 1  # the loss of one sample, which is its mean
    mean, labels = one or reduction == _MEAN or kind == "Mean", hasattr(node, "_saved_total_weight")
    if not given or not (mean or reduction == _SUM or kind == "Sum") or (kind == "Mean" and _joins_rows(given[0])):
        return outer
    shape = _shape(given[0])
    items = _saved(node, "total_weight") if labels and not one else float(prod(shape[:1] if one else shape))
    if items is None or (isinstance(items, Tensor) and items.dtype.itemsize < float32.itemsize):  # wrong from 256 on
        return outer
    own = kind not in ("Mean", "Sum") or _of_samples(given[0])
    term = replace(outer, kind=kind, mean=mean, items=float(items), shape=shape, labels=labels, of_samples=own)
    length, padded = 0.0, False
    with suppress(Exception):  # a mask that a hook has
        length, padded = _length(given[0]) if kind in ("Mean", "Sum") else (length, padded)
    return replace(term, logits=_log_softmax(node, labels=labels), length=length, padded=padded)


def _joins_rows(node: Any) -> bool:
    """Whether the first dimension may be another than that of the samples."""
    left = [node]
    for _ in range(_MOST):
        if not left:
            return False
        node = left.pop()
        if not re.fullmatch(_LAYER, node.name()):
            dims, size = getattr(node, "_saved_dim", ()), len(_shape(_inputs(node)[0])) or 1
            if re.fullmatch(_JOINS, node.name()) or {0, 2**64 - size} & set([dims] if isinstance(dims, int) else dims):
                return True
            left += _inputs(node)
    return True


def _of_samples(node: Any) -> bool:
    """Whether it is computed by some layer, and not from weights element by element."""
    left = [node]
    for _ in range(_MOST):
        if not left:
            return False
        node = left.pop()
        if re.fullmatch(_LAYER, node.name()) and "AccumulateGrad" not in node.name():
            return True
        left += _inputs(node)
    return True


def _log_softmax(node: Any, *, labels: bool) -> Any:
    """What a loss of labels is computed from, or the sum by which torch smooths the labels; None of all else."""
    names, node = list[str](), _inputs(node)[0]
    while len(names) < _SMOOTH.count(" ") and not node.name().startswith("LogSoftmax") and len(_inputs(node)) == 1:
        names, node = [*names, node.name()], _inputs(node)[0]
    path = " ".join([*names, node.name()])
    smooth = re.fullmatch(r"(\w*ViewBackward\d )*LogSoftmaxBackward\d" if labels else _SMOOTH, path)
    return node if smooth else None


def _unsmoothed(terms: list[Term]) -> list[Term]:
    """One term in place of the two by which torch smooths the labels of a cross entropy, of one log-softmax."""
    for smooth in [term for term in terms if term.logits is not None and term.kind == "Sum" and not term.labels]:
        for i, hard in enumerate(terms):
            of_both = hard.labels and hard.mean and hard.logits is smooth.logits and hard.factor * smooth.factor >= 0
            if of_both and hard.items in smooth.divisors:
                whole = replace(hard, factor=hard.factor + smooth.factor * hard.items * hard.shape[1])
                return _unsmoothed([whole if j == i else one for j, one in enumerate(terms) if one is not smooth])
    return terms


def _layers(node: Any, count: float) -> frozenset[Any]:
    """The layers that a mean is computed from with the rows of all samples; empty where it may be of some of them."""
    layers, left = set[Any](), [node] if count >= _PAIR else []
    for _ in range(_MOST):
        if not left:
            break
        node = left.pop()
        size, name = _shape(node), node.name()
        if size[:1] == (1,) or re.fullmatch(_JOINS, name):
            return frozenset()
        if re.fullmatch(_LAYER, name) and "Loss" not in name:
            if size[0] % count:
                return frozenset()
            layers.add(node)
            continue
        for one in _inputs(node):
            of = () if one.name() == _LEAF else _shape(one)
            fewer = prod(size) < prod(of) and not re.fullmatch(_REDUCES, name)
            if fewer and (of[0] != size[0] or {of[0], count} & set(of[1:])):  # else of features
                return frozenset()
            left += [one] if of else []
    return frozenset() if left else frozenset(layers)


def _is_whole(term: Term, terms: Sequence[Term]) -> bool:
    """Whether a mean is of all samples: no other is computed by the same weights once again, as of another sample."""
    pairs = [(term.layers - other.layers, other.layers - term.layers) for other in terms if other is not term]
    return bool(term.layers) and not any(_weights(own) & _weights(others) for own, others in pairs)


def _weights(layers: frozenset[Any]) -> set[Any]:
    """Of layers; None among them where one's are not known."""
    found = set[Any]()
    for layer in layers:
        given = _inputs(layer)
        for i in range(len(given)):
            while re.fullmatch(r"(T|ToCopy|Transpose|Permute|\w*View)Backward\d", given[i].name()):
                given[i] = _inputs(given[i])[0]
        own = {one for one in given if one.name() == _LEAF}
        found |= own or {None}
    return found


def _length(node: Any) -> tuple[float, bool]:
    """What each row of a loss is divided by, 0 where no labels and no mask tell its length; whether rows are padded."""
    shape, divisors = tuple[int, ...](), list[float]()
    for _ in range(_MOST):
        name, given = node.name(), _inputs(node)
        valid = _valid(node, name)
        if valid is not None:
            if len(shape) != _PAIR or valid.numel() != prod(shape) or not divisors:
                break
            ends = valid.reshape(shape) * arange(1, shape[1] + 1, device=valid.device)
            first, last = ends.masked_fill(ends == 0, shape[1] + 1).amin(1), ends.amax(1)
            runs = ((last - first + 1).clamp(min=0) == (ends > 0).sum(1)).all()
            by_it = any(close(one, shape[1]) for one in divisors)
            return prod(divisors), bool(by_it and runs and last.max() == shape[1] and last.min() < shape[1])
        if len(given) != 1:
            break
        if re.fullmatch(r"(Sum|Mean)Backward\d", name):
            shape = shape or _shape(given[0])
            divisors += [prod(_shape(given[0])) / prod(_shape(node))] if name[0] == "M" else []
        elif by := _factor(node, name):
            divisors.append(float(by) if name[0] == "D" else 1 / float(by))
        elif not re.fullmatch(r"(Neg|ToCopy|Clone|Alias|\w*View|Squeeze|Unsqueeze)Backward\d", name):
            break
        node = given[0]
    return 0.0, False


def _valid(node: Any, name: str) -> Any:
    """Which elements a mask, or labels that are ignored, leave in a loss; None where there is neither."""
    if name.startswith("NllLoss") and node._saved_reduction == _NONE:
        return _saved(node, "target", whole=True) != node._saved_ignore_index
    if name.startswith("MaskedFill"):
        return ~_saved(node, "mask", whole=True)
    if name.startswith("Where"):
        mask = _saved(node, "condition", whole=True)
        return mask if node.next_functions[0][0] is not None else ~mask
    if name[:3] != "Mul":
        return None
    mask = _saved(node, "other" if node.next_functions[0][0] is not None else "self", whole=True)
    many = isinstance(mask, Tensor) and mask.numel() > 1 and len(_inputs(node)) == 1
    return mask != 0 if many and bool(((mask == 0) | (mask == 1)).all()) else None
