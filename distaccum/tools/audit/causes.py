"""Finds out which sum of micro-batches' gradients a loop has stepped with, and says it in words.

A loop's gradient is, but for odd faults, a weighted sum of the gradients of its micro-batches' loss sums; the right
weights are all 1 / count of the window. Each known fault is another set of weights. Those are tried from the simplest
to the oddest, with a common factor left free, and the first that gives the loop's gradient is the finding. The factor
is then explained by the window's own numbers: ranks, micro-batches, items, loss scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from distaccum.tools.audit.records import Clip

_SPREAD = 1e-3  # of a factor beside the number that explains it, in fp32
_ALIKE, _ROUNDING = 2.0, 1e-6  # residuals within this factor, or below this, are taken for the same
_MANY, _MUCH = 100, 3  # elements, and times nearer, from which on a direction is no chance
_PLAIN = 0.1  # factors from here on are written with two decimals


@dataclass(frozen=True)
class Cause:
    """Why a gradient is not the global batch's: a name, the reason in words, and the line that mends it."""

    name: str
    words: str
    remedy: str


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The numbers of a window; lists are by rank and micro-batch.

    ``positions``: labels, whether they count or not. ``usual``: micro-batches per rank of the first window.
    """

    counts: list[list[float]]
    samples: list[list[int]]
    positions: list[list[int]]
    usual: int
    loss_scale: float | None = None

    @property
    def ranks(self) -> int:
        """The world size."""
        return len(self.counts)

    @property
    def steps(self) -> int:
        """Micro-batches of the rank that has most."""
        return max(map(len, self.counts))

    @property
    def micro_batches(self) -> int:
        """Micro-batches of all ranks."""
        return sum(map(len, self.counts))

    @property
    def count(self) -> float:
        """The window's count over all ranks."""
        return sum(map(sum, self.counts))

    @property
    def where(self) -> list[tuple[int, int]]:
        """``(rank, micro-step)`` of each micro-batch, in the order of a candidate's weights."""
        return [(rank, step) for rank, counts in enumerate(self.counts) for step in range(len(counts))]


@dataclass(frozen=True, kw_only=True)
class Observed:
    """One rank's gradient beside those of the micro-batches.

    Attributes:
        rank: whose it is.
        gradient: ``(n,)``, elements of it, before a clipping at the window's end.
        basis: ``(micro-batches of all ranks, n)``, the same elements of the gradients of the loss sums.
        before: the same elements of what the rank stepped with in the window before; None for the first.
        clips: of each rank.
        tolerance: relative, of the loop's number format.
        agreed: whether all ranks have the same gradient.
    """

    rank: int
    gradient: Tensor
    basis: Tensor
    before: Tensor | None
    clips: Sequence[Sequence[Clip]]
    tolerance: float
    agreed: bool = True


@dataclass(frozen=True)
class _Candidate:
    """Weights of the micro-batches, by the way of averaging (``base``) and by what became of parts of the sum."""

    base: str
    weights: list[float]
    fault: Cause | None = None
    leftover: bool = False


def find_causes(shape: Shape, observed: Observed) -> tuple[Cause, ...]:
    """The likely causes, most telling first; empty where no known one gives the gradient."""
    rows = observed.basis @ observed.basis.T
    fitting: list[tuple[float, float, _Candidate]] = []
    for candidate in _candidates(shape, observed):
        target = observed.gradient
        if candidate.leftover:
            if observed.before is None:
                continue
            target = target - observed.before
        weights = torch.tensor(candidate.weights, dtype=torch.float64)
        square, across = float(weights @ rows @ weights), float(weights @ (observed.basis @ target))
        if square <= 0.0 or across <= 0.0:
            continue
        factor = across / square
        left = math.sqrt(max(0.0, float(target @ target) - across * factor)) / float(target.norm())
        if left <= observed.tolerance:
            fitting.append((left, factor, candidate))
    if not fitting:
        return ()
    # The simplest of those that fit alike: in few bits the tolerance is so wide that near misses fit, too.
    enough = max(min(left for left, _, _ in fitting) * _ALIKE, _ROUNDING)
    _, factor, candidate = next(fit for fit in fitting if fit[0] <= enough)
    return _named(candidate, factor, shape, observed)


def nearer(shape: Shape, observed: Observed) -> tuple[Cause, ...]:
    """A way of averaging that is much nearer to a gradient, in few bits, than the global batch's mean is.

    Rounding points nowhere: it does not bring a gradient nearer to another way's.
    """
    if len(observed.gradient) < _MANY:
        return ()
    left = {}
    for base, weights in _bases(shape).items():
        sums = torch.tensor(weights, dtype=torch.float64) @ observed.basis
        across = float(sums @ observed.gradient) / float(sums @ sums)
        left[base] = float((observed.gradient - across * sums).norm())
    best = min(left, key=lambda base: left[base])  # the first of those alike
    found = _averaging(best, shape) if left[best] * _MUCH < left["global"] else None
    return () if found is None else (found,)


def explained(factor: float, tolerance: float) -> bool:
    """Whether a factor is 1."""
    return abs(factor - 1.0) <= max(tolerance, 1e-9)


# ------------------------------------------------------------------------------------------ candidates


def _bases(shape: Shape) -> dict[str, list[float]]:
    """Ways to average, as the weight of each micro-batch's loss sum; the true one first."""
    ranks, everything = shape.ranks, shape.micro_batches
    of_rank = [sum(counts) for counts in shape.counts]
    of_step = [sum(c[step] for c in shape.counts if step < len(c)) for step in range(shape.steps)]
    samples = sum(map(sum, shape.samples))
    found: dict[str, list[float]] = {name: [] for name in (*_AVERAGES, "global")}
    for rank, step in shape.where:
        n, rows, places = shape.counts[rank][step], shape.samples[rank][step], shape.positions[rank][step]
        found["global"].append(_over(1, shape.count))
        found["of ranks"].append(_over(1, ranks * of_rank[rank]))
        found["of micro-batches"].append(_over(1, everything * n))
        found["of ranks' micro-batches"].append(_over(1, ranks * len(shape.counts[rank]) * n))
        found["of micro-steps"].append(_over(1, shape.steps * of_step[step]))
        found["by samples"].append(_over(rows, samples * n))
        found["padded"].append(_over(1, everything * places))
        found["of ranks by samples"].append(_over(1, ranks * sum(shape.samples[rank])))
    return {name: found[name] for name in ("global", *_AVERAGES) if any(found[name])}


_AVERAGES = (
    "of ranks",
    "of micro-batches",
    "of ranks' micro-batches",
    "of micro-steps",
    "by samples",
    "padded",
    "of ranks by samples",
)


def _candidates(shape: Shape, observed: Observed) -> Iterator[_Candidate]:
    bases = _bases(shape)
    for base, weights in bases.items():
        yield _Candidate(base, weights)
    for fault, parts in _parts(shape, observed):
        for base, weights in bases.items():
            yield _Candidate(base, [w * part for w, part in zip(weights, parts, strict=True)], fault)
    for base, weights in bases.items():
        yield _Candidate(base, weights, _LEFT_OVER, leftover=True)


def _parts(shape: Shape, observed: Observed) -> Iterator[tuple[Cause, list[float]]]:
    """What may have become of each micro-batch's share: cut off by a clip, not reduced, zeroed, multiplied."""
    where, own, ranks, steps = shape.where, observed.rank, shape.ranks, shape.steps
    if any(clip.backwards < len(shape.counts[rank]) for rank, clips in enumerate(observed.clips) for clip in clips):
        yield _CLIPPED_EARLY, [_cut(observed.clips[rank], step, len(shape.counts[rank])) for rank, step in where]
    if not observed.agreed:
        alone = Cause(
            "not reduced",
            f"rank {own} steps with its own gradient: nothing reduces it over the ranks",
            "call the forward through the wrapped model (ddp_model(x), not ddp_model.module(x)), with no_sync() in "
            "every micro-step but the last",
        )
        yield alone, [float(rank == own) for rank, _ in where]
        for first in range(1, steps):
            yield _reduced_early(first, steps), [_early(rank, step, first, own, ranks) for rank, step in where]
    if ranks > 1:
        for missing in range(ranks):
            words = f"rank {missing}'s gradient is missing: it did not take part in the reduction"
            yield (
                Cause("rank missing", words, "let every rank run its last micro-step's forward outside of no_sync()"),
                [float(rank != missing) for rank, _ in where],
            )
    for first in range(1, steps):
        words = f"the first {first} of {steps} micro-batches are missing: zero_grad() in the middle of a window"
        mend = "call optimizer.zero_grad() after optimizer.step() only, not in every micro-step"
        yield Cause("zeroed inside the window", words, mend), [float(step >= first) for _, step in where]
        words = f"the last {steps - first} of {steps} micro-batches are missing from the gradient of the step"
        mend = "step after the window's last backward, and reduce in its last micro-step"
        yield Cause("stepped too early", words, mend), [float(step < first) for _, step in where]
    for ratio, what in ((ranks, "by the world size"), (2, "by 2"), (1 / ranks, "by 1 / world size"), (0.5, "by 1/2")):
        if steps > 1 and ratio != 1:
            words = f"each micro-step multiplies {what} what has accumulated before it: reduced again and again"
            mend = "reduce once, in the last micro-step: with model.no_sync(): loss.backward() in the others"
            parts = [float(ratio) ** (len(shape.counts[rank]) - 1 - step) for rank, step in where]
            yield Cause("reduced in every micro-step", words, mend), parts


def _early(rank: int, step: int, first: int, own: int, ranks: int) -> float:
    """The share of a micro-batch when only the first micro-steps were reduced, and the others stayed on their rank."""
    if step < first:
        return 1.0
    return float(ranks) if rank == own else 0.0


def _reduced_early(first: int, steps: int) -> Cause:
    return Cause(
        "rank missing at the boundary",
        f"the other ranks' micro-batches {first + 1} to {steps} are missing: no_sync() at the boundary, while "
        f"micro-step {first} was reduced",
        "leave no_sync() in the window's last micro-step, not its first: (i + 1) % accumulation_steps != 0",
    )


def _cut(clips: Sequence[Clip], step: int, steps: int) -> float:
    """What the clips in the middle of a window left of micro-batch ``step``."""
    return math.prod(clip.coefficient for clip in clips if step < clip.backwards < steps)


_LEFT_OVER = Cause(
    "left over",
    "the gradient of the window before is still in it: it was not zeroed",
    "call optimizer.zero_grad() after every optimizer.step()",
)
_CLIPPED_EARLY = Cause(
    "clipped inside the window",
    "the gradient was clipped before the window's accumulation had ended",
    "call clip_grad_norm_ once, after the window's last backward",
)

# ------------------------------------------------------------------------------------------ words


def _named(candidate: _Candidate, factor: float, shape: Shape, observed: Observed) -> tuple[Cause, ...]:
    causes = [] if candidate.fault is None else [candidate.fault]
    averaged = _averaging(candidate.base, shape)
    alone = candidate.fault is not None and candidate.fault.name in ("not reduced", "rank missing", "stepped too early")
    if averaged is not None and not alone:
        causes.append(averaged)
    if not explained(factor, observed.tolerance) and not alone:
        causes.append(_factor(factor, candidate.base, shape, max(_SPREAD, observed.tolerance)))
    # A short window names itself by its factor; the averaging is the graver fault and stays first.
    return tuple(causes)


def _averaging(base: str, shape: Shape) -> Cause | None:
    if base == "global":
        return None
    counts = [n for counts in shape.counts for n in counts]
    spread = f"{min(counts):g} to {max(counts):g}"
    of_ranks = _listed([f"{sum(counts):g}" for counts in shape.counts])
    mend = (
        "sum the loss (reduction='sum') and divide by the window's count on all ranks: dist.all_reduce(count) before "
        "the first backward, then loss = loss_sum * world_size / count"
    )
    words = {
        "of ranks": f"mean of means: each rank divides by its own count, and the ranks have {of_ranks}",
        "of micro-batches": f"mean of means: each micro-batch is divided by its own count, which is {spread}",
        "of ranks' micro-batches": f"mean of means: each micro-batch is divided by its own count ({spread}), and each "
        f"rank by its own number of micro-batches ({_listed([str(len(c)) for c in shape.counts])})",
        "of micro-steps": f"mean of means: each micro-step is divided by its own count over the ranks ({spread} a "
        "micro-batch)",
        "by samples": f"mean of means: each micro-batch is divided by its own count ({spread}), and is "
        "weighted by its samples",
        "padded": "padding is counted: each micro-batch is divided by all of its positions, also those that the loss "
        "leaves out",
        "of ranks by samples": "each rank divides by its samples, while the loss sums over "
        f"{shape.count:g} items of unequal number a rank",
    }
    name = {
        "padded": "padding counted",
        "of ranks": "mean of means over ranks",
        "of ranks by samples": "samples counted",
    }
    return Cause(name.get(base, "mean of means over micro-batches"), words[base], mend)


def _factor(factor: float, base: str, shape: Shape, spread: float) -> Cause:
    """The cause of a common factor: a divisor that the window's numbers give, or a product of them."""
    short = shape.steps / shape.usual
    if shape.steps != shape.usual and _near(factor, short, spread):
        what = "short window" if short < 1 else "long window"
        words = f"{_times(factor)}: {what}: {shape.steps} micro-batches divided by {shape.usual}"
        mend = "divide by the micro-batches that the window really has, or better by the count of what they hold"
        return Cause(what, words, mend)
    if base == "global":
        divisor = _divisor(factor, shape, spread)
        if divisor is not None:
            return divisor
    return _product(factor, shape, spread)


def _divisor(factor: float, shape: Shape, spread: float) -> Cause | None:
    """Another number that the sum was divided by instead of the count."""
    rows, places = sum(map(sum, shape.samples)), sum(map(sum, shape.positions))
    mend = f"divide by what the loss sums over: {shape.count:g} here, over all ranks"
    if places != shape.count and _near(factor, shape.count / places, spread):
        words = f"{_times(factor)} = {shape.count:g} / {places}: padding is counted: the loss sums over {shape.count:g}"
        return Cause("padding counted", f"{words} of {places} positions", mend)
    if _near(factor, shape.count / (shape.count + rows), min(spread, 0.2 * rows / shape.count)):
        words = f"{_times(factor)} = {shape.count:g} / ({shape.count:g} + {rows} rows): the first label of each row is"
        return Cause("shifted-out labels counted", f"{words} counted, and the shift drops it", mend)
    if rows != shape.count and _near(factor, shape.count / rows, spread) and not _simple(factor, shape, spread):
        words = f"{_times(factor)} = {shape.count:g} items / {rows} samples: divided by the samples, not by the items"
        return Cause("samples counted", words, mend)
    return None


_MEANINGS: dict[tuple[int, int], tuple[str, str, str]] = {
    (0, 1): (
        "micro-batches summed",
        "the micro-batches are summed, and nothing divides by their number",
        "loss = loss / {steps}  (or DeepSpeed's gradient_accumulation_steps={steps}) in every micro-step",
    ),
    (0, -1): (
        "divided by the micro-batches twice",
        "divided by the number of micro-batches once too often",
        "divide once: accelerate, DeepSpeed and the Trainer divide by themselves; leave out your own loss / {steps}",
    ),
    (1, 0): (
        "times the world size",
        "summed over the ranks where it should be averaged, or multiplied by the world size without need",
        "leave out the * world_size (it is for a loss over all ranks' count), or divide the gradient by {ranks}",
    ),
    (-1, 0): (
        "averaged over the ranks twice",
        "the reduction averages over the ranks (as DDP does), and the loss is divided by all ranks' count already",
        "loss = loss * {ranks}  # the world size, which the reduction divides by",
    ),
    (1, 1): (
        "world size x micro-batches",
        "the mean of each micro-batch is multiplied by the world size, and nothing divides by the micro-batches",
        "loss = loss / {steps}, without the * world_size",
    ),
    (-1, -1): (
        "over world size x micro-batches",
        "divided by the ranks and by the micro-batches after a division by the count of the whole window",
        "loss = loss_sum * {ranks} / count, with nothing else that divides",
    ),
}


def _simple(factor: float, shape: Shape, spread: float) -> bool:
    return any(n > 1 and (_near(factor, n, spread) or _near(factor, 1 / n, spread)) for n in (shape.ranks, shape.steps))


def _product(factor: float, shape: Shape, spread: float) -> Cause:
    """The simplest product of powers of the window's numbers that is ``factor``."""
    scale = shape.loss_scale or 1.0
    numbers = (float(shape.ranks), float(shape.steps), scale, shape.count, shape.steps / shape.usual)
    powers = [(a, b, c, d, e) for a, b, c, d, e in product(_SIGNED, _SIGNED, (0, 1, -1), (0, 1), (0, 1))]
    powers.sort(key=lambda p: (sum(map(abs, p)), -sum(p)))
    matching = [
        p
        for p in powers
        if any(p)
        and all(n != 1 for n, power in zip(numbers, p, strict=True) if power)
        and _near(factor, math.prod(n**power for n, power in zip(numbers, p, strict=True)), spread)
    ]
    if not matching:
        words = f"{_times(factor)}, which neither the ranks, the micro-batches nor the counts explain"
        return Cause("unexplained factor", words, "look for a constant that multiplies or divides the loss")
    fewest = sum(map(abs, matching[0]))
    alike = [p for p in matching if sum(map(abs, p)) == fewest]
    alike = alike if fewest == 1 else alike[:1]
    equation = f"{_times(factor)} = {' or '.join(_spelled(p, shape) for p in alike)}"
    first = alike[0]
    if first[2]:
        mend = "scaler.step(optimizer) instead of optimizer.step(), or scaler.unscale_(optimizer) before"
        return Cause("loss scale left in", f"{equation}: the loss scale is still in the gradient", mend)
    if first[3]:
        mend = f"divide the summed loss by the window's count on all ranks: {shape.count:g} here"
        return Cause("sum not divided", f"{equation}: a sum over the items, which is not divided by their count", mend)
    meanings = [_MEANINGS[p[:2]] for p in alike if p[:2] in _MEANINGS]
    if not meanings:
        return Cause("unexplained factor", equation, "look for what multiplies or divides the loss by these numbers")
    short = "" if not first[4] else f", in a window of {shape.steps} micro-batches instead of {shape.usual}"
    filled = [mend.format(ranks=shape.ranks, steps=shape.steps) for _, _, mend in meanings]
    return Cause(
        " or ".join(name for name, _, _ in meanings),
        f"{equation}: {', or '.join(words for _, words, _ in meanings)}{short}",
        "; or: ".join(filled),
    )


_SIGNED = (0, 1, -1, 2, -2)


def _spelled(powers: tuple[int, ...], shape: Shape) -> str:
    names = (
        f"{shape.ranks} ranks",
        f"{shape.steps} micro-batches",
        f"loss scale {shape.loss_scale or 1.0:g}",
        f"{shape.count:g} items",
        f"{shape.steps}/{shape.usual} of a window",
    )
    over = [name for name, p in zip(names, powers, strict=True) for _ in range(p)]
    under = [name for name, p in zip(names, powers, strict=True) for _ in range(-p)]
    below = f"({' x '.join(under)})" if len(under) > 1 else "".join(under)
    return f"{' x '.join(over) or '1'}{f' / {below}' if below else ''}"


def _times(factor: float) -> str:
    if factor < 1 and _near(1 / factor, round(1 / factor), _SPREAD):
        return f"1/{round(1 / factor)}"
    return f"{factor:.2f}x" if factor >= _PLAIN else f"{factor:.3g}x"


def _near(factor: float, number: float, spread: float) -> bool:
    return abs(factor - number) <= spread * abs(number)


def _over(a: float, b: float) -> float:
    return a / b if b else 0.0


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
