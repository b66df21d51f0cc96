"""What the graph of a loss says of it: a mean that is given as a sum, or with another count than it is a mean over."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from math import isnan, log2, nan, prod
from typing import Any

from torch import Tensor, arange, float32

from distaccum.data.window import Window
from distaccum.distributed.world import World
from distaccum.engines.ownership import nodes_of
from distaccum.errors import VerificationError
from distaccum.losses.normalize import SINGLE, LossSum, as_loss_sums
from distaccum.tools.gather import expect_none_of_torch
from distaccum.tools.weight_terms import MANY, added_once, close, constants_of_weights, digits
from distaccum.verification.expected import CLOSING

_log = logging.getLogger(__name__)
_PAIR, _MOST, _SCALE = 2, 256, 256.0  # the nodes that are looked at; the least that a loss scaler multiplies by
_TERMS = 4096  # nodes down to terms: a penalty of weights adds one for each parameter
_NONE, _MEAN, _SUM = 0, 1, 2  # torch's numbers of reductions
_KEEPS = r"(ToCopy|Clone|Alias|\w*View|Squeeze|Unsqueeze|NanToNum|Mean|Sum)Backward\d"  # the value of one element
_JOINS = r"(Stack|Cat|Index\w+|Scatter\w*|Segment\w*|Cumsum)Backward\d|.*Backward"  # rows, or nobody knows what
_REDUCES = r"(Sum|Mean|Logsumexp|Amax|Amin|Norm|\w*VectorNorm|\w*Loss\w*)Backward\d"
_SMOOTH = r"MaskedFillBackward\d NegBackward\d SumBackward\d (MulBackward\d )?LogSoftmaxBackward\d"
_LEAF = "torch::autograd::AccumulateGrad"
_LAYER = r"(Addmm|Mm|Bmm|Convolution|Embedding|\w*Loss\w*)Backward\d|torch::autograd::AccumulateGrad"


@dataclass(frozen=True, slots=True)
class _Term:
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

    def times(self, factor: float, *, divisor: float = 1.0, scale: float = 1.0) -> _Term:
        divisors = self.divisors if divisor == 1.0 else (*self.divisors, divisor)
        by = self.multipliers if factor in (1, -1) else (*self.multipliers, abs(factor))
        scales = self.scale * scale
        return replace(self, factor=self.factor * factor / divisor, divisors=divisors, multipliers=by, scale=scales)


class Means:
    """The losses of a window's micro-batches, as their graphs tell of them.

    Args:
        window: has not begun.
    """

    def __init__(self, window: Window) -> None:
        self._counts = [micro.counts for micro in window.micro_batches]
        self._noted: list[list[tuple[str, float, Sequence[_Term]]]] = []  # name, count and terms of each loss

    def note(self, losses: LossSum, counts: Any = None) -> None:
        """Notes what the next micro-batch gives as its sums, before its backward; may wait for the device.

        Args:
            losses: a 0-dim tensor, or one for each of several losses, by name.
            counts: of the micro-batch, where the window does not know them: a number, a 0-dim tensor, or numbers by
                name.

        Raises:
            MisuseError: torch's ``all_gather`` is in a graph, which gives a wrong gradient over gloo.
        """
        counts = next(iter(self._counts[len(self._noted) :][:1]), {}) or counts
        by_name = counts if isinstance(counts, Mapping) else {SINGLE: counts}
        sums = as_loss_sums(losses)
        known = {name: (loss, float(by_name[name])) for name, loss in sums.items() if by_name.get(name)}
        for loss, _ in known.values():
            expect_none_of_torch(nodes_of(loss))
        self._noted.append([(name, count, terms_of(loss.grad_fn, count)) for name, (loss, count) in known.items()])

    def check(self, world: World, *, closing: str = CLOSING, sums: bool = False) -> None:
        """Judges what all ranks have noted; a collective.

        Nothing is known of a micro-batch whose losses are noted one by one. Where samples are known to add up, as
        ``sums`` says, a mean is multiplied by its count: a graph does not tell ``0.5 * 2 * mean`` from a mean.

        Raises:
            VerificationError: a loss is a mean and was given as a sum, its mean is over another count, or it is divided
                by the number of micro-batches, or multiplied by a loss scale; on all ranks.
        """
        steps, own, shares = len(self._noted), list[str](), list[tuple[str, float, str]]()
        lengths = list[tuple[str, float, float, str]]()
        counts, factors = dict[str, list[float]](), dict[str, set[tuple[float, ...]]]()
        for name, count, terms in chain.from_iterable(self._noted):
            counts.setdefault(name, []).append(count)
            factors.setdefault(name, set()).add(tuple(term.factor for term in terms))
        totals = world.all_gather_object({name: sum(given) for name, given in counts.items()})
        parts = {"micro-batches": steps, "ranks": world.size, "micro-batches on all ranks": steps * world.size}
        for i, losses in enumerate(self._noted if steps == len(self._counts) else []):
            for name, count, terms in losses:
                where = f"the loss {name!r} of micro-batch {i} on rank {world.rank} "
                changing = len(set(counts[name])) > 1 and len(factors[name]) == 1
                labels = {"labels in the window": sum(of_rank.get(name, 0) for of_rank in totals)}
                numbers = parts | (labels if all(term.labels for term in terms) else {})
                forgotten = "" if sums else _forgotten(terms, count, changing=changing)
                problem = forgotten or _factored(terms, count, numbers)
                own += [where + problem] if problem else []
                shares += [(name, *_share(terms, count, where)), (f"{name}, divided", *_divided(terms, count, where))]
                lengths += _padded(name, terms, count, where)
        weights = [one for losses in self._noted for one in _of_weights(losses)]
        beside = [one for losses in self._noted for one in _of_means(losses)]
        told = world.all_gather_object((own[:1], shares, lengths, weights, beside))
        problems = [one for each, *_ in told for one in each] or _miscounted(
            [one for _, each, *_ in told for one in each]
        )
        problems = problems or _unlike([one for _, _, each, *_ in told for one in each])
        if problems:
            raise VerificationError(f"{problems[0]}. {closing}")
        once = added_once([one for *_, each, _ in told for one in each])
        for one in [once, *_unlike([one for *_, each in told for one in each])] if world.is_main else []:
            if one:
                _log.warning("%s", one)


def terms_of(root: Any, count: float = 0.0) -> Sequence[_Term]:
    """What a loss is the sum of, with the count of its micro-batch; empty where nobody knows."""
    with suppress(Exception):  # torch promises nothing of its nodes, and a number may be complex, or hidden by a mode
        terms = _unsmoothed(_read(root, count))
        return [replace(one, whole=_is_whole(one, terms), logits=None, layers=frozenset()) for one in terms]
    return []


def _read(root: Any, count: float) -> list[_Term]:
    found, left = list[_Term](), [(root, _Term())]
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


def _reduction(node: Any, name: str, given: Sequence[Any], outer: _Term) -> _Term:
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


def _of_weights(losses: Sequence[tuple[str, float, Sequence[_Term]]]) -> Iterator[tuple[str, float, float, bool]]:
    """Of each loss with a term of weights alone beside others: name, count, the term's factor, whether that has it."""
    for name, count, terms in losses:
        others = [term for term in terms if term.constants is None]
        rows = {int(count), *(size for term in others for size in term.shape[:1])}
        found = [term for term in terms if term.constants is not None and not term.constants & rows]
        for term in found[:1] if others else ():
            yield name, count, term.factor, any(close(by, count) for by in term.multipliers)


def _of_means(losses: Sequence[tuple[str, float, Sequence[_Term]]]) -> Iterator[tuple[str, float, float, str]]:
    """Of each mean beside others, one of which is over the count: what a row and an item weigh, and what it is over."""
    for name, count, terms in losses:
        known = [term for term in terms if term.kind and term.of_samples and term.constants is None]
        matched = count >= _PAIR and any(close(term.items, count) for term in known)
        for i, term in enumerate(known if matched and all(term.mean for term in known) else []):
            rows, told = (term.shape or (1,))[0], ""
            if count not in (rows, term.items):
                told = (
                    f"the loss {name!r} adds a mean over {rows} ({term.kind}) to one over its count of {count:g}: what "
                )
                told += "it weighs depends on the micro-batches; give each by name, as da.from_mean(mean, its count)"
            yield f"{name} {i}", term.factor / rows, term.factor / (term.items or nan), told


def _unlike(found: Sequence[tuple[str, float, float, str]]) -> list[str]:
    """The words of one of what is not the same in all micro-batches, in neither of two ways to count."""
    for name in dict.fromkeys(name for name, *_ in found):
        *both, told = zip(*(one for other, *one in found if other == name), strict=True)
        if any(told) and not any(close(min(each), max(each)) for each in both):
            return [next(filter(None, told))]
    return []


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


def _unsmoothed(terms: list[_Term]) -> list[_Term]:
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


def _is_whole(term: _Term, terms: Sequence[_Term]) -> bool:
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


def _forgotten(terms: Sequence[_Term], count: float, *, changing: bool = False) -> str:
    """A mean over what was counted, which nothing multiplies by the count."""
    each = len(terms) > 1 and sum(term.mean and not term.whole for term in terms) >= count  # a mean for each sample
    mixed = all(term.mean for term in terms) and close(sum(term.factor for term in terms), 1.0)  # as of two labels
    sums = any(term.kind and not term.mean and term.of_samples for term in terms)
    means = [term for term in terms if _is_mean(term, count, changing or mixed, beside=sums and term.mean)]
    if not means or count < _PAIR:  # of one sample, or once a micro-batch
        return ""
    heads = len(terms) > 1 and not len(terms) % count and not any(term.mean for term in means)  # a mean of sums
    if (each and not mixed) or heads:
        return ""
    if sum(term.items for term in means) <= 1:
        return ""
    return (
        f"is a mean ({means[0].kind}, over {sum(term.items for term in means) if each else means[0].items:g}) and was "
        f"given as the sum over a count of {count:g}, which divides it a second time: write "
        'acc.backward(loss, count, reduction="mean"); where a function returns it, reduction="sum" or '
        "da.from_mean(mean, count)"
    )


def _is_mean(term: _Term, count: float, changing: bool, *, beside: bool) -> bool:
    """Whether nothing multiplies a mean over samples, or over labels, by their count, nor by a share or multiple of it.

    Args:
        term: of a loss.
        count: of its micro-batch.
        changing: whether another micro-batch has another count, and the same factors; or these are shares of 1.
        beside: whether it is a mean beside a sum.
    """
    factor = abs(term.factor)
    if term.mean:
        known = term.kind != "Mean" or (term.of_samples and count in (term.items, *term.shape[:1]))
    else:
        features = (*term.shape[1:], prod(term.shape[1:]))  # by whose number a sum over samples may be divided
        samples = not term.labels and count not in features and (count in term.shape[:1] or term.items % count > 0)
        known = (term.items == count or samples) and term.of_samples and count > _PAIR and count in term.divisors
        factor *= count
    multiplied = any(close(by, count) for by in term.multipliers)
    own, of_sum = digits(factor), digits(factor / count)
    weighed = factor < 1 and (changing or own < of_sum == MANY)
    if beside:  # where both may be written, that of a mean is likelier: a sum is written as one
        weighed = weighed or own < of_sum or (factor < 1 and own == of_sum == 1 and f"{factor:e}"[0] in "125")
    return known and not multiplied and (weighed or close(factor, 1.0))


def _factored(terms: Sequence[_Term], count: float, parts: Mapping[str, int]) -> str:
    """Multiplied by a power of two that is no count; or divided by the number of micro-batches or ranks."""
    scale = min((term.scale for term in terms), default=0.0)
    known = {count, *(number for term in terms for number in (term.items, *term.divisors))}
    if scale >= _SCALE and log2(scale).is_integer() and scale not in known:
        remedy = 'leave the GradScaler out, and give precision="fp16", which scales losses and gradients'
        return f"is multiplied by {scale:g}, as scaler.scale(loss) does, and nothing divides it again: {remedy}"
    for what, number in parts.items():
        if terms and number >= _PAIR and all(_divides(number, term, count, len(terms)) for term in terms):
            remedy = f"leave the division by {number:g} out, as the count of the whole window divides it"
            return f"is divided by {number:g}, as many as there are {what}: {remedy}"
    return ""


def _divides(number: int, term: _Term, count: float, terms: int) -> bool:
    """Whether a term is divided by a number, which is not that of something else, nor of the halves of a square."""
    if number not in term.divisors or number in (terms, *term.shape[1:]) or (number == _PAIR and not term.labels):
        return False
    mean = term.mean and term.multipliers == (count,) and term.divisors == (number,)  # as of as many samples
    return term.items not in (0.0, number * count) and (mean or abs(term.factor) not in (1.0, count, term.items))


def _share(terms: Sequence[_Term], count: float, where: str) -> tuple[float, str]:
    """What a label weighs in a loss that is one mean of labels, else NaN; and in words that the count is not theirs."""
    weighed = [term for term in terms if term.labels and not close(term.items, round(term.items))]
    term = terms[0] if len(terms) == 1 else weighed[0] if weighed else _Term()  # others may be means of other things
    if not (term.labels and term.mean and term.items):
        return nan, ""
    each, rows, told = term.items / count, prod(term.shape[:1] + term.shape[2:]), ""
    if not close(each, round(each)) and (count >= _PAIR or rows == count):  # else the mean of each sample's labels
        remedy = "count the labels that it does not ignore, after a shift, each with the weight of its class"
        told = f"{where}is a mean over {term.items:g} ({term.kind}), and its count is {count:g}: {remedy}"
    return term.factor / term.items, told


def _divided(terms: Sequence[_Term], count: float, where: str) -> tuple[float, str]:
    """What an item weighs in a loss of samples, but for its sizes; and in words that no count of items divides it."""
    term = next((term for term in terms if term.of_samples and term.items and term.factor), None)
    if term is None:
        return nan, ""
    sizes = [size for size in (term.items, *term.shape, prod(term.shape[1:])) if not close(size, count)]
    by_size = [divisor for divisor in term.divisors if any(close(divisor, size) for size in sizes)]
    odd = [divisor for divisor in term.divisors if divisor not in by_size and not close(divisor, count)]
    if not term.mean and not term.divisors and any(close(by, count) for by in term.multipliers):
        odd = [1.0]  # a mean over one
    told = ""
    if odd and count >= _PAIR and term.shape[:1] != (1,):  # else of one sample, by what is its own
        remedy = "give the sum over what is divided by as its count, or divide by what all micro-batches have in common"
        told = f"{where}is divided by {odd[-1]:g} ({term.kind}), others by other numbers, and its count is {count:g}"
        told = f"{told}: {remedy}"
    by_items = abs(term.factor) / count if term.mean else abs(term.factor)
    return by_items * prod(by_size), told


def _padded(name: str, terms: Sequence[_Term], count: float, where: str) -> Iterator[tuple[str, float, float, str]]:
    """What rows are divided by below a sum of them, and in all; and in words that it is what they are padded to."""
    for term in [term for term in terms if term.length and count >= _PAIR][:1]:
        remedy = "divide each by its own length, or by what all micro-batches have in common, or count the labels"
        told = (
            f"{where}divides each sample by {term.length:g}, as this micro-batch is padded, and others by other numbers"
        )
        yield name, term.length, abs(term.factor) / term.length, f"{told}: {remedy}" if term.padded else ""


def _miscounted(shares: Sequence[tuple[str, float, str]]) -> list[str]:
    """Means over other counts, where the labels of one micro-batch therefore weigh more than those of another."""
    for name in dict.fromkeys(name for name, _, _ in shares):
        known = [w for one, w, _ in shares if one == name and not isnan(w)]  # none of a micro-batch of one number
        wrong = [t for one, _, t in shares if one == name and t]
        if wrong and known and not close(min(known), max(known)):
            return wrong[:1]
    return []
