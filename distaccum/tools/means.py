"""What the graph of a loss says of it: a mean that is given as a sum, or with another count than it is a mean over."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from math import isnan, log2, nan, prod
from typing import Any

from distaccum.data.window import Window
from distaccum.distributed.world import World
from distaccum.engines.ownership import nodes_of
from distaccum.errors import VerificationError
from distaccum.losses.normalize import SINGLE, LossSum, as_loss_sums
from distaccum.tools.gather import expect_none_of_torch
from distaccum.tools.loss_terms import Term, terms_of
from distaccum.tools.weight_terms import MANY, added_once, close, digits
from distaccum.verification.expected import CLOSING

_log = logging.getLogger(__name__)
_PAIR, _SCALE = 2, 256.0  # samples; the least that a loss scaler multiplies by


class Means:
    """The losses of a window's micro-batches, as their graphs tell of them.

    Args:
        window: has not begun.
    """

    def __init__(self, window: Window) -> None:
        self._counts = [micro.counts for micro in window.micro_batches]
        self._noted: list[list[tuple[str, float, Sequence[Term]]]] = []  # name, count and terms of each loss

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


def _of_weights(losses: Sequence[tuple[str, float, Sequence[Term]]]) -> Iterator[tuple[str, float, float, bool]]:
    """Of each loss with a term of weights alone beside others: name, count, the term's factor, whether that has it."""
    for name, count, terms in losses:
        others = [term for term in terms if term.constants is None]
        rows = {int(count), *(size for term in others for size in term.shape[:1])}
        found = [term for term in terms if term.constants is not None and not term.constants & rows]
        for term in found[:1] if others else ():
            yield name, count, term.factor, any(close(by, count) for by in term.multipliers)


def _of_means(losses: Sequence[tuple[str, float, Sequence[Term]]]) -> Iterator[tuple[str, float, float, str]]:
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


def _forgotten(terms: Sequence[Term], count: float, *, changing: bool = False) -> str:
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


def _is_mean(term: Term, count: float, changing: bool, *, beside: bool) -> bool:
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


def _factored(terms: Sequence[Term], count: float, parts: Mapping[str, int]) -> str:
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


def _divides(number: int, term: Term, count: float, terms: int) -> bool:
    """Whether a term is divided by a number, which is not that of something else, nor of the halves of a square."""
    if number not in term.divisors or number in (terms, *term.shape[1:]) or (number == _PAIR and not term.labels):
        return False
    mean = term.mean and term.multipliers == (count,) and term.divisors == (number,)  # as of as many samples
    return term.items not in (0.0, number * count) and (mean or abs(term.factor) not in (1.0, count, term.items))


def _share(terms: Sequence[Term], count: float, where: str) -> tuple[float, str]:
    """What a label weighs in a loss that is one mean of labels, else NaN; and in words that the count is not theirs."""
    weighed = [term for term in terms if term.labels and not close(term.items, round(term.items))]
    term = terms[0] if len(terms) == 1 else weighed[0] if weighed else Term()  # others may be means of other things
    if not (term.labels and term.mean and term.items):
        return nan, ""
    each, rows, told = term.items / count, prod(term.shape[:1] + term.shape[2:]), ""
    if not close(each, round(each)) and (count >= _PAIR or rows == count):  # else the mean of each sample's labels
        remedy = "count the labels that it does not ignore, after a shift, each with the weight of its class"
        told = f"{where}is a mean over {term.items:g} ({term.kind}), and its count is {count:g}: {remedy}"
    return term.factor / term.items, told


def _divided(terms: Sequence[Term], count: float, where: str) -> tuple[float, str]:
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


def _padded(name: str, terms: Sequence[Term], count: float, where: str) -> Iterator[tuple[str, float, float, str]]:
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
