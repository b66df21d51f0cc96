"""Is a loss a sum over what it counts? Two samples apart must give what they give together."""

from __future__ import annotations

import logging
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from distaccum.data.batches import map_tensors, to_device
from distaccum.data.window import Window
from distaccum.distributed.random import RNGState
from distaccum.engines.base import Engine
from distaccum.engines.buffers import state_restored
from distaccum.engines.compiled import uncompiled
from distaccum.engines.modules import evaluating
from distaccum.errors import VerificationError
from distaccum.losses.base import Loss
from distaccum.losses.normalize import Count, Counts, as_counts, as_loss_sums
from distaccum.program import FIRST_LOSS, load
from distaccum.verification.expected import closing

_log = logging.getLogger(__name__)
_ROUNDING = 1e-3  # of a sum, where its samples are padded and batched otherwise; a mean is off by a half
_ROUNDING_16 = 3e-2
_EXACT = 1e-5  # of a sum, in which no term of weight is a mean
_ROUNDING_PADDED = 1e-4  # of the same samples in another shape
_PAIR, _LOOKED_AT = 2, 8  # samples
_UNPADDED = 4  # of the batches that are measured
_OF_PROGRAM = re.compile("does not require grad|and DTensor")  # on all ranks: the micro-step says what is meant


@dataclass(frozen=True)
class _Measured:
    """The losses and counts of one batch, by name."""

    losses: Mapping[str, float]
    counts: Counts


@dataclass(frozen=True)
class _Shapes:
    """One sample, two, and two with other random numbers; ``padded`` two, two in the other order, and one."""

    one: _Measured
    both: _Measured
    anew: _Measured
    padded: Sequence[_Measured]

    @property
    def names(self) -> Sequence[str]:
        """Of the losses that are compared; none without padding."""
        return list(self.both.losses) if self.padded else []


def check_loss(engine: Engine, window: Window, loss: Loss, count: Count | None = None, *, parts: bool = True) -> bool:
    """Compares the losses and counts of two samples apart and together; a collective.

    As the model trains, with the gradients unless all micro-batches are single samples; and in evaluation mode where
    that shows no sum.

    Where micro-batches are padded to fixed shapes, samples are compared without that and with it; in training mode too,
    if the model draws no random numbers there.

    A loss that compares samples, or is random, is no error: it is logged. What ``count`` counts divides the loss;
    without it what the loss counts itself.

    Returns:
        whether this rank has found the loss to be a sum to rounding, as it trains: whatever its graph looks like.

    Raises:
        VerificationError: the loss is a mean, the count is not that of its samples, or padding to a fixed shape changes
            one of the two; on all ranks.
    """
    batches, world = _pair(window), engine.world
    without, padded = world.all_reduce_host([batches is None, batches is not None and len(batches) > _UNPADDED])
    if without == world.size or (engine.facts.forward_communicates and without):
        return False
    if batches is not None and engine.facts.forward_communicates and padded < world.size:
        batches = batches[:_UNPADDED]  # as many forwards on every rank
    error, warning, trains = "", "", list[Mapping[str, float]]()
    with load(FIRST_LOSS)(engine.unwrapped_model) as first:
        if batches is not None and parts and not engine.facts.forward_communicates:
            alone = window.fetch is not None and all(len(ids) < _PAIR for ids in window.ids())  # nothing is shared
            error, trains = _gradients(engine, loss, batches, {} if alone else None)
        if batches is not None and not error:
            counted = loss.count if count is None else count
            try:
                error, warning, found = _compare(engine, loss, counted, batches, trains)
                if found and not warning:
                    steps = {"micro-batches": len(window.micro_batches), "ranks": world.size}
                    warning = first.in_words(found.losses, sum(found.counts.values()), batches[0], steps)
            except Exception as problem:  # the user's code on a batch of one sample, or in evaluation mode
                if engine.facts.forward_communicates and not _OF_PROGRAM.search(str(problem)):
                    raise  # others may wait in a forward
                _log.info("the loss was not checked for being a sum: %s: %s", type(problem).__name__, problem)
    errors = world.all_gather_names([error] if error else [])
    if errors:
        raise VerificationError(errors[0])
    warnings = world.all_gather_names([warning] if warning else [])
    if warnings and world.is_main:
        _log.warning("%s", warnings[0])
    together, *apart = (sum(each.values()) for each in trains) if trains else [0.0]
    return abs(together - sum(apart)) <= _EXACT * sum(map(abs, apart)) != 0.0


def _pair(window: Window) -> list[Any] | None:
    """Two samples apart, and together twice; None where this rank has none that can be told apart.

    Where micro-batches are padded to fixed shapes, so are the two, in either order, and the first alone, at the end.
    """
    generators = RNGState.capture()
    try:
        return _collated(window) or _cut(window)
    except Exception as error:  # the user's dataset or collation, on one sample
        _log.info("two samples could not be collated for the check of the loss: %s", error)
        return _cut(window)
    finally:
        generators.restore()


def _collated(window: Window) -> list[Any] | None:
    """From the dataset, collated apart and together: what padding adds is then seen."""
    ids = [int(i) for micro in window.ids() for i in micro][:_LOOKED_AT]
    if window.fetch is None or not ids:
        return None
    samples, collate = window.fetch(ids)
    bare = getattr(collate, "bare", None)
    samples = [one for one in samples if one is not None]  # what is broken is left out

    def batch(*places: int, by: Callable[[list[Any]], Any] = bare or collate) -> Any:
        return by([deepcopy(samples[place]) for place in places])  # collations may change what they are given

    samples = samples if len(samples) >= _PAIR else samples * _PAIR
    alone = batch(0)
    other = next((i for i in range(1, len(samples)) if _shapes(batch(i)) != _shapes(alone)), 1)
    fixed = [] if bare is None else [batch(*places, by=collate) for places in ((0, other), (other, 0), (0,))]
    return [alone, batch(other), batch(0, other), batch(0, other), *fixed]


def _shapes(batch: Any) -> list[Any]:
    shapes: list[Any] = []
    map_tensors(batch, lambda tensor: shapes.append(tensor.shape))
    return shapes


def _cut(window: Window) -> list[Any] | None:
    """A micro-batch cut in two along dimension 0, where that is the number of its samples."""
    for micro, ids in zip(window.micro_batches, window.ids(), strict=False):
        rows = rows_of(micro.batch, len(ids), parts=2)
        if rows is not None and len(rows) == _PAIR:
            return [*rows, micro.batch, micro.batch]
    return None


def rows_of(batch: Any, size: int, *, parts: int = 0) -> list[Any] | None:
    """A micro-batch of ``size`` samples cut along dimension 0, into single ones or so many; None where it cannot be."""
    sizes = {shape[0] if shape else 0 for shape in _shapes(batch)}
    if size == 1 and len(sizes) == 1:  # an item of a stream that is a whole micro-batch
        (size,) = sizes
    if not size or sizes != {size}:
        return None
    ends = [size * i // (parts or size) for i in range((parts or size) + 1)]
    return [_rows(batch, start, stop) for start, stop in pairwise(ends) if stop > start]


def _rows(batch: Any, start: int, stop: int) -> Any:
    return map_tensors(batch, lambda tensor: tensor[start:stop])


def _compare(
    engine: Engine, loss: Loss, count: Count, batches: Sequence[Any], trains: Sequence[Mapping[str, float]]
) -> tuple[str, str, _Measured | None]:
    """An error, or a warning, in words; and what two samples have together where the loss is a sum, and not random.

    Args:
        trains: the losses together and apart as the model trains, where those are known.
    """
    tolerance, of_padding = (_ROUNDING_16, _ROUNDING_16) if in_16_bits(engine) else (_ROUNDING, _ROUNDING_PADDED)

    def judged(name: str, pair: Sequence[_Measured]) -> tuple[str, str]:
        return _judge(name, [one.losses[name] for one in pair], [one.counts.get(name, 0.0) for one in pair], tolerance)

    pair, shapes, known = list[_Measured](), list[_Shapes](), [trains[i] for i in (1, 2, 0) if trains]
    if known and not batches[_UNPADDED:]:
        pair = [_Measured(losses, as_counts(count(batch))) for losses, batch in zip(known, batches, strict=False)]
    if not pair or any(any(judged(name, pair)) for name in pair[-1].losses):
        try:
            pair, shapes = _measure(engine, loss, count, batches)
        except Exception:  # a loss that differentiates by itself cannot without a graph, as in evaluation
            if not pair:
                raise
    ab, again = pair[2], pair[-1]
    warned, random = "", False
    for name in ab.losses:
        if not all(math.isfinite(measured.losses[name]) for measured in pair):
            continue
        if not _close(ab.losses[name], again.losses[name], tolerance):
            random = True  # of its own
            continue
        error, warning = judged(name, pair[:3])
        if error:
            return error, "", None
        warned = warned or warning
    if error := next(filter(None, (_judge_padding(name, one, of_padding) for one in shapes for name in one.names)), ""):
        return error, "", None
    return "", warned, None if warned or random else ab


def _measure(engine: Engine, loss: Loss, count: Count, batches: Sequence[Any]) -> tuple[list[_Measured], list[_Shapes]]:
    """Two samples apart, together, and once more with other random numbers; and what padding makes of them."""
    # Uncompiled: it would be compiled for two shapes that no window has.
    with evaluating(engine.unwrapped_model) as train_again, uncompiled, torch.no_grad(), state_restored(engine, loss):
        state = RNGState.capture(engine.device)

        def measure(batch: Any, *, anew: bool = False) -> _Measured:
            if not anew:
                state.restore()  # a layer that is left out at random is left out of all of them
            counts = as_counts(count(batch))
            with engine.autocast():
                sums = as_loss_sums(loss(engine.unwrapped_model, to_device(batch, engine.device)))
            return _Measured({name: float(part) for name, part in sums.items()}, counts)

        a, b, ab = map(measure, batches[:3])
        again = measure(batches[3], anew=True)
        shapes = [_Shapes(a, ab, again, [measure(batch) for batch in batches[_UNPADDED:]])]
        if batches[_UNPADDED:]:
            train_again()  # what is only there while it trains: a term of its own, statistics of the batch
            try:
                with warnings.catch_warnings(action="ignore"):
                    unpadded = measure(batches[0]), measure(batches[2]), measure(batches[3], anew=True)
                    shapes.append(_Shapes(*unpadded, [measure(batch) for batch in batches[_UNPADDED:]]))
            except Exception as problem:  # statistics of a batch of one sample
                if engine.facts.forward_communicates:
                    raise
                _log.info("padding was not looked at in training mode: %s: %s", type(problem).__name__, problem)
    return [a, b, ab, again], shapes


def _gradients(
    engine: Engine, loss: Loss, batches: Sequence[Any], weights: Mapping[str, Tensor] | None
) -> tuple[str, list[Mapping[str, float]]]:
    """An error in words, where losses add up and gradients do not; and the losses together and apart, as it trains."""
    from distaccum.verification.parts import gradient_of_parts  # noqa: PLC0415  it imports this module

    try:
        found, losses = gradient_of_parts(engine, loss, batches[:2], batches[2], weights)
    except Exception as problem:  # the user's code, as above
        _log.info("the gradients of two samples were not compared: %s: %s", type(problem).__name__, problem)
        return "", []
    if not found:
        return "", losses
    what = f"the losses of two samples add up, and their gradients do not: {found}"
    why = "A hook or a function in the backward looks at the whole micro-batch, or adds a gradient for each"
    return f"{what}. {why}: write it as a term of the loss, summed over samples. {closing('parts')}", []


def _judge(name: str, losses: list[float], counts: list[float], tolerance: float) -> tuple[str, str]:
    (a, b, ab), (count_a, count_b, count_ab) = losses, counts
    size = abs(a) + abs(b)
    adds_up = abs(ab - a - b) <= tolerance * size
    counts_add_up = _close(count_ab, count_a + count_b, 1e-6)
    if adds_up and counts_add_up:
        return "", ""
    of = "" if name == "loss" else f" {name!r}"
    measured = f"two samples have the loss{of} {a:.6g} and {b:.6g} apart and {ab:.6g} together"
    if not counts_add_up:
        return _judge_count(of, counts, measured, adds_up=adds_up)
    if size and _close(ab * count_ab, a * count_a + b * count_b, tolerance):
        return (
            f"{measured}, {ab / (a + b):.2f} of their sum: it is a mean over its count ({count_a:g}, {count_b:g} and "
            f'{count_ab:g}), and would be divided by the count a second time. Return the sum: reduction="sum" in the '
            "loss function, or da.from_mean(mean, count); in a loop, acc.backward(mean, num_items=count, "
            'reduction="mean")'
        ), ""
    if size and _close(2 * ab, a + b, tolerance):
        return (
            f"{measured}, 0.50 of their sum: it is a mean over the samples of a micro-batch. Return the sum over them: "
            'reduction="sum" in the loss function, or .sum() in place of .mean()'
        ), ""
    return "", (
        f"{measured}: it compares the samples of a micro-batch, so that the gradient depends on the micro-batch size "
        "(a contrastive loss, or statistics of the batch), or adds a term of the weights alone once (multiply that by "
        "the count, or use weight_decay). Where it should not, sum over the samples, or have the loss called with "
        "those of the whole window: write represent(model, batch), as a distaccum.WindowLoss has it"
    )


def _judge_count(of: str, counts: list[float], measured: str, *, adds_up: bool) -> tuple[str, str]:
    count_a, count_b, count_ab = counts
    if count_ab == count_a == count_b:  # a term of the micro-batch, as one that balances experts: on purpose
        return "", f"the loss{of} counts {count_ab:g} for every micro-batch: it depends on the micro-batch size"
    numbers = f"two samples count {count_a:g} and {count_b:g} apart and {count_ab:g} together{of and f', for{of}'}"
    if not adds_up:
        return "", f"{numbers}, and {measured}: neither adds up, so that the gradient depends on the micro-batch size"
    return (
        f"{numbers}: the count includes what is only there because they are padded to one length, and the gradient "
        "would depend on the micro-batch size. Count the labels that the loss sums over: `(labels != -100).sum()`, or "
        "da.count_labels(labels)"
    ), ""


def _judge_padding(name: str, shapes: _Shapes, tolerance: float) -> str:
    """An error in words; of a loss that draws random numbers nothing, as another shape draws others."""
    if not _close(shapes.both.losses[name], shapes.anew.losses[name], 1e-6):
        return ""
    of = "" if name == "loss" else f" {name!r}"
    said: list[tuple[str, str]] = []
    for padded, bare in zip(shapes.padded, (shapes.both, shapes.both, shapes.one), strict=True):
        (loss, count), (loss_then, count_then) = (
            (measured.losses[name], measured.counts.get(name, 0.0)) for measured in (bare, padded)
        )
        alone = bare is shapes.one
        if not _close(count, count_then, 1e-6):
            who = "a sample counts" if alone else "two samples count"
            seen = f"{who} {count:g}{of and f' for{of}'}, and {count_then:g}"
            said.append((seen, "count the labels that are not ignored"))
        elif not _close(loss, loss_then, tolerance):
            who = "a sample has" if alone else "two samples have"
            remedy = "let the model mask padding, as by causal attention or an attention mask"
            said.append((f"{who} the loss{of} {loss:.6g}, and {loss_then:.6g}", remedy))
        else:
            said.append(("", ""))
    both, other_order, one = said
    if bool(both[0]) != bool(other_order[0]):
        remedy = "The collate function sorts its samples, and rows are filled up behind them: let it keep their order"
        return f"{both[0] or other_order[0]} where rows are filled up, but not in the other order. {remedy}"
    seen, remedy = both if both[0] else one
    if not seen:
        return ""
    remedy = f"{remedy}, or leave pad_to, pad_to_multiple_of and pad_rows out"
    return f"{seen} where they are padded to the fixed shape: {remedy}"


def in_16_bits(engine: Engine) -> bool:
    """Whether some weight's forward is rounded to 16 bits."""
    return max(engine.probe.unit_roundoff(p) for p in engine.unwrapped_model.parameters()) > 2.0**-20


def _close(a: float, b: float, tolerance: float) -> bool:
    return abs(a - b) <= tolerance * max(abs(a), abs(b))
