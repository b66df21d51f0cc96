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

from torch import Tensor, float32

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
        known = {name: loss for name, loss in as_loss_sums(losses).items() if by_name.get(name)}
        for loss in known.values():
            expect_none_of_torch(nodes_of(loss))
        self._noted.append([(name, float(by_name[name]), terms_of(loss.grad_fn)) for name, loss in known.items()])

    def check(self, world: World, *, closing: str = CLOSING, sums: bool = False) -> None:
        """Judges what all ranks have noted; a collective.

        Nothing is known of a micro-batch whose losses are noted one by one. Where samples are known to add up, as
        ``sums`` says, a mean is multiplied by its count: a graph does not tell ``0.5 * 2 * mean`` from a mean.

        Raises:
            VerificationError: a loss is a mean and was given as a sum, its mean is over another count, or it is divided
                by the number of micro-batches, or multiplied by a loss scale; on all ranks.
        """
        steps, own, shares = len(self._noted), list[str](), list[tuple[str, float, str]]()
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
        weights = [one for losses in self._noted for one in _of_weights(losses)]
        told = world.all_gather_object((own[:1], shares, weights))
        problems = [one for each, *_ in told for one in each] or _miscounted(
            [one for _, each, _ in told for one in each]
        )
        if problems:
            raise VerificationError(f"{problems[0]}. {closing}")
        if (once := added_once([one for *_, each in told for one in each])) and world.is_main:
            _log.warning("%s", once)


def terms_of(root: Any) -> Sequence[_Term]:
    """What a loss is the sum of; empty where nobody knows."""
    with suppress(Exception):  # torch promises nothing of its nodes, and a number may be complex, or hidden by a mode
        return _unsmoothed(_read(root))
    return []


def _read(root: Any) -> list[_Term]:
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
            found.append(replace(_reduction(node, name, given, outer), constants=constants_of_weights(node)))
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


def _saved(node: Any, name: str) -> Any:
    """A number, or a tensor of one; None where a hook has it, which may compute a forward again."""
    if getattr(getattr(node, f"_raw_saved_{name}", None), "unpack_hook", None) is not None:
        return None
    kept = getattr(node, f"_saved_{name}")
    return kept if not isinstance(kept, Tensor) else kept.detach() if kept.numel() == 1 else None


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
    return replace(outer, kind=kind, mean=mean, items=float(items), shape=shape, labels=labels, of_samples=own)


def _of_weights(losses: Sequence[tuple[str, float, Sequence[_Term]]]) -> Iterator[tuple[str, float, float, bool]]:
    """Of each loss with a term of weights alone beside others: name, count, the term's factor, whether that has it."""
    for name, count, terms in losses:
        others = [term for term in terms if term.constants is None]
        rows = {int(count), *(size for term in others for size in term.shape[:1])}
        found = [term for term in terms if term.constants is not None and not term.constants & rows]
        for term in found[:1] if others else ():
            yield name, count, term.factor, any(close(by, count) for by in term.multipliers)


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


def _unsmoothed(terms: list[_Term]) -> list[_Term]:
    """One term in place of the two by which torch smooths the labels of a cross entropy."""
    if len(terms) == _PAIR:
        smooth, hard = sorted(terms, key=lambda term: term.labels)
        if hard.labels and hard.mean and smooth.kind == "Sum" and hard.items in smooth.divisors:
            return [replace(hard, factor=hard.factor + smooth.factor * hard.items * hard.shape[1])]
    return terms


def _forgotten(terms: Sequence[_Term], count: float, *, changing: bool = False) -> str:
    """A mean over what was counted, which nothing multiplies by the count."""
    each = len(terms) > 1 and sum(term.mean for term in terms) >= count  # a mean for each sample
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


def _miscounted(shares: Sequence[tuple[str, float, str]]) -> list[str]:
    """Means over other counts, where the labels of one micro-batch therefore weigh more than those of another."""
    for name in dict.fromkeys(name for name, _, _ in shares):
        known = [w for one, w, _ in shares if one == name and not isnan(w)]  # none of a micro-batch of one number
        wrong = [t for one, _, t in shares if one == name and t]
        if wrong and known and not close(min(known), max(known)):
            return wrong[:1]
    return []
