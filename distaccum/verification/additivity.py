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
from distaccum.verification.expected import closing

_log = logging.getLogger(__name__)
_ROUNDING = 1e-3  # of a sum, where its samples are padded and batched otherwise; a mean is off by a half
_ROUNDING_16 = 3e-2
_EXACT = 1e-5  # of a sum, in which no term of weight is a mean
_ROUNDING_PADDED = 1e-4  # of the same samples in another shape
_PAIR, _LOOKED_AT = 2, 8  # samples
_UNPADDED = 4  # of the batches that are measured
_OF_PROGRAM = re.compile("does not require grad|and DTensor")  # on all ranks: the micro-step says what is meant
_CLASSES = 5e-2  # how near the first loss is to ln(classes) times a factor


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
    """Compares the losses and counts of two samples apart and together, in evaluation mode; a collective.

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
    error, warning, sums = "", "", False
    if batches is not None:
        try:
            steps = {"micro-batches": len(window.micro_batches), "ranks": world.size}
            error, warning = _compare(engine, loss, loss.count if count is None else count, batches, steps)
        except Exception as problem:  # the user's code on a batch of one sample, or in evaluation mode
            if engine.facts.forward_communicates and not _OF_PROGRAM.search(str(problem)):
                raise  # others may wait in a forward
            _log.info("the loss was not checked for being a sum: %s: %s", type(problem).__name__, problem)
    if batches is not None and not (error or warning or engine.facts.forward_communicates):
        error, sums = _gradients(engine, loss, batches) if parts else ("", False)
    errors = world.all_gather_names([error] if error else [])
    if errors:
        raise VerificationError(errors[0])
    warnings = world.all_gather_names([warning] if warning else [])
    if warnings and world.is_main:
        _log.warning("%s", warnings[0])
    return sums


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
    engine: Engine, loss: Loss, count: Count, batches: Sequence[Any], steps: Mapping[str, float]
) -> tuple[str, str]:
    """An error, or a warning, in words; empty where the loss is a sum."""
    # Uncompiled: it would be compiled for two shapes that no window has.
    model = engine.unwrapped_model
    with evaluating(model) as train_again, uncompiled, torch.no_grad(), state_restored(engine, loss):
        state = RNGState.capture(engine.device)

        def measure(batch: Any, *, anew: bool = False) -> _Measured:
            if not anew:
                state.restore()  # a layer that is left out at random is left out of all of them
            counts = as_counts(count(batch))
            with engine.autocast():
                sums = as_loss_sums(loss(engine.unwrapped_model, to_device(batch, engine.device)))
            return _Measured({name: float(part) for name, part in sums.items()}, counts)

        classes: list[int] = []
        hook = engine.unwrapped_model.register_forward_hook(lambda *call: classes.append(_classes(call[-1])))
        try:
            a, b, ab = map(measure, batches[:3])
            again = measure(batches[3], anew=True)
            shapes = [_Shapes(a, ab, again, [measure(batch) for batch in batches[_UNPADDED:]])]
        finally:
            hook.remove()
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
    tolerance, of_padding = (_ROUNDING_16, _ROUNDING_16) if in_16_bits(engine) else (_ROUNDING, _ROUNDING_PADDED)
    warned, random = "", False
    for name in ab.losses:
        parts = [measured.losses[name] for measured in (a, b, ab, again)]
        if not all(map(math.isfinite, parts)):
            continue
        if not _close(parts[2], parts[3], tolerance):
            random = True  # of its own
            continue
        counts = [measured.counts.get(name, 0.0) for measured in (a, b, ab)]
        error, warning = _judge(name, parts[:3], counts, tolerance)
        if error:
            return error, ""
        warned = warned or warning
    if error := next(filter(None, (_judge_padding(name, one, of_padding) for one in shapes for name in one.names)), ""):
        return error, ""
    if warned or random:
        return "", warned
    known = set(classes)
    counted = sum(ab.counts.values())
    if len(ab.losses) == len(known) == 1 and min(known) >= _PAIR and counted and _has_labels(batches[0], *known):
        mean = sum(ab.losses.values()) / counted
        return "", suspicious_first_loss(mean, min(known), steps)
    return "", ""


def _gradients(engine: Engine, loss: Loss, batches: Sequence[Any]) -> tuple[str, bool]:
    """An error in words, where losses add up and gradients do not; and whether losses do to rounding, in training."""
    from distaccum.verification.parts import gradient_of_parts  # noqa: PLC0415  it imports this module

    try:
        found, losses = gradient_of_parts(engine, loss, batches[:2], batches[2])
    except Exception as problem:  # the user's code, as above
        _log.info("the gradients of two samples were not compared: %s: %s", type(problem).__name__, problem)
        return "", False
    if not found:
        together, *apart = losses or [0.0]
        return "", abs(together - sum(apart)) <= _EXACT * sum(map(abs, apart)) != 0.0
    what = f"the losses of two samples add up, and their gradients do not: {found}"
    why = "A hook or a function in the backward looks at the whole micro-batch, or adds a gradient for each"
    return f"{what}. {why}: write it as a term of the loss, summed over samples. {closing('parts')}", False


def _has_labels(batch: Any, classes: int) -> bool:
    """Whether a batch holds whole numbers that may be classes: a regression's loss is no logarithm of anything."""
    found: list[bool] = []

    def look(tensor: Tensor) -> None:
        whole = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)
        found.append(whole and tensor.numel() > 0 and 0 <= int(tensor.max()) < classes)

    map_tensors(batch, look)
    return any(found)


def _classes(output: Any) -> int:
    """The last dimension of a model's output, as logits have it; 0 of an output with none."""
    output = getattr(output, "logits", output)
    return output.shape[-1] if isinstance(output, Tensor) and output.ndim > 1 else 0


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


def suspicious_first_loss(mean: float, classes: int, factors: Mapping[str, float]) -> str:
    """In words, a first loss that is ``ln(classes)`` over one of ``factors``, or all of them; empty where it is not.

    An untrained classifier gives every class about the same probability.
    """
    factors = {**factors, " x ".join(factors): math.prod(factors.values())}
    for name, factor in factors.items():
        if factor != 1.0 and abs(mean * factor / math.log(classes) - 1.0) < _CLASSES:
            return (
                f"the first loss is {mean:.4g}, and ln({classes}) = {math.log(classes):.4g} is {factor:g} times that, "
                f"as many as there are {name}: is the loss divided by them?"
            )
    return ""


def in_16_bits(engine: Engine) -> bool:
    """Whether some weight's forward is rounded to 16 bits."""
    return max(engine.probe.unit_roundoff(p) for p in engine.unwrapped_model.parameters()) > 2.0**-20


def _close(a: float, b: float, tolerance: float) -> bool:
    return abs(a - b) <= tolerance * max(abs(a), abs(b))
