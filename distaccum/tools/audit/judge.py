"""Judges one window on rank 0: figures, the verdict, and the causes of a wrong one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from distaccum.data.batches import map_tensors
from distaccum.errors import DataError, MisuseError, shorten
from distaccum.tools.audit.causes import Cause, Observed, Shape, find_causes, nearer
from distaccum.tools.audit.records import Clip, WindowRecord, tensors_of
from distaccum.tools.audit.reference import Reference
from distaccum.tools.audit.report import Finding

FP32_TOLERANCE, LOW_TOLERANCE = 1e-4, 5e-2  # relative; a plain fp32 loop is off by about 1e-6, a bf16 one by 1e-2
_ROUND = 1e-4  # how near a round number a norm is that was clipped to it
_MOST_ELEMENTS = 2**27  # of all micro-batches' gradients together, in the search for causes

_NOT_FINITE = Cause(
    "not finite", "the gradient holds NaN or infinity", "look where: with torch.autograd.set_detect_anomaly(True):"
)
_NO_GRADIENT = Cause(
    "no gradient",
    "there is no gradient: nothing came back, or it was zeroed before the step",
    "call zero_grad() after the step, and give the optimizer the parameters of the model that the forward uses",
)
_DIVERGED = Cause(
    "ranks diverged",
    "the ranks' weights differ, so that their gradients have no common one",
    "mend the window before; ranks that start alike and step with the same gradient stay alike",
)
_RANDOM = Cause(
    "random forward",
    "the forward draws random numbers, other ones the second time: no two gradients of it can be compared",
    "switch it off for the audit: noise, masks, and dropout whose probability stands as a number in a forward",
)


@dataclass
class Judge:
    """Judges windows in their order; it remembers the last one, which may have left something over.

    ``tolerance``: None: by the loop's number format. ``usual``: micro-batches of a whole window on a rank; 0: as
    many as the first has.
    """

    reference: Reference
    names: Sequence[str]
    tolerance: float | None
    usual: int = 0
    _before: tuple[int, list[Tensor]] | None = None

    def judge(self, window: WindowRecord) -> Finding:
        """Computes the window again, and compares.

        Raises:
            MisuseError: the loss or the count cannot be computed.
            DataError: the window counts nothing.
        """
        self.reference.load(window.weights)
        loop = [self._flat(window, rank) for rank in range(len(window.ranks))]
        truth, basis, shape, stride = self._truth(window)
        low = any(record.low_precision for record in window.ranks) or torch.get_float32_matmul_precision() != "highest"
        tolerance = self.tolerance or (LOW_TOLERANCE if low else FP32_TOLERANCE)
        notes = _notes(window, low)
        unclipped, clip_causes = [], list[Cause]()
        for rank, record in enumerate(window.ranks):
            raw, note, cause = _unclip(loop[rank], record.clips, len(record.batches), shape.loss_scale)
            unclipped.append(raw)
            notes += [note] if note and note not in notes else []
            clip_causes += [cause] if cause and cause not in clip_causes else []
        errors = [float((gradient - truth).norm() / truth.norm()) for gradient in unclipped]
        worst = max(range(len(errors)), key=lambda rank: _order(errors[rank]))
        gradient = unclipped[worst]
        before = self._before[1][worst] if self._before and self._before[0] == window.index - 1 else None
        observed = Observed(
            rank=worst,
            gradient=gradient[::stride],
            basis=basis,
            before=None if before is None else before[::stride],
            clips=[record.clips for record in window.ranks],
            tolerance=tolerance,
            agreed=all(float((g - gradient).norm()) <= tolerance * float(gradient.norm()) for g in unclipped),
        )
        causes = tuple(clip_causes)
        if not errors[worst] <= tolerance:  # NaN is not less
            found, note = self._causes(window, shape, observed, gradient, truth)
            causes += found
            if note is not None:  # clipped alike
                notes.append(note)
                truth = truth * (gradient.norm() / truth.norm())
        elif low and errors[worst] > FP32_TOLERANCE:  # what rounding hides may still be told by its direction
            causes += nearer(shape, observed)
        self._before = (window.index, loop)
        factor = float(gradient @ truth / (truth @ truth))
        cosine = float(gradient @ truth / (gradient.norm() * truth.norm())) if gradient.any() else 0.0
        return Finding(
            window=window.index + 1,
            factor=factor,
            cosine=cosine,
            error=float((gradient - truth).norm() / truth.norm()),
            tolerance=tolerance,
            right=not causes,
            causes=causes,
            micro_batches=tuple(len(record.batches) for record in window.ranks),
            counts=tuple(map(sum, shape.counts)),
            notes=tuple(notes),
        )

    def _flat(self, window: WindowRecord, rank: int) -> Tensor:
        gradients = window.gradients(rank)
        return self.reference.flat({name: gradients[name] for name in self.names})

    def _truth(self, window: WindowRecord) -> tuple[Tensor, Tensor, Shape, int]:
        """The global batch's gradient; each micro-batch's, thinned by the stride; the counts; the stride."""
        every = [[self.reference.count(batch) for batch in record.batches] for record in window.ranks]
        flat = [counts for rank in every for counts in rank]
        totals = {name: sum(counts[name] for counts in flat) for name in flat[0]} if flat else {}
        main = next(iter(totals), "")
        if not totals or not totals[main]:
            raise DataError(
                f"window {window.index + 1} counts nothing: count() is 0 for all of its {len(flat)} micro-batches"
            )
        per_item = {name: totals[main] / total if total else 0.0 for name, total in totals.items()}
        batches = [batch for record in window.ranks for batch in record.batches]
        truth: Tensor | None = None
        basis, stride = list[Tensor](), 1
        for batch in batches:
            gradient = self.reference.gradient(batch, self.names, per_item)
            stride = max(1, len(batches) * gradient.numel() // _MOST_ELEMENTS)
            truth = gradient / totals[main] if truth is None else truth.add_(gradient, alpha=1 / totals[main])
            basis.append(gradient[::stride].clone())
        assert truth is not None
        counts = [[found[main] for found in rank] for rank in every]
        self.usual = self.usual or max(map(len, counts))
        shape = Shape(
            counts=counts,
            samples=[[_samples(batch) for batch in record.batches] for record in window.ranks],
            positions=[[_positions(batch) for batch in record.batches] for record in window.ranks],
            usual=self.usual,
            loss_scale=next((record.loss_scale for record in window.ranks if record.loss_scale), None),
        )
        return truth, torch.stack(basis), shape, stride

    def _causes(
        self, window: WindowRecord, shape: Shape, observed: Observed, gradient: Tensor, truth: Tensor
    ) -> tuple[tuple[Cause, ...], str | None]:
        """Of a gradient that is not the right one: why; or nothing, and a note that says why it is right after all."""
        broken = (
            (_NOT_FINITE, not bool(gradient.isfinite().all())),
            (_NO_GRADIENT, not bool(gradient.any())),
            (_DIVERGED, len({record.weights_digest for record in window.ranks}) > 1),
        )
        for cause, seen in broken:
            if seen:
                return (cause,), None
        found = find_causes(shape, observed)
        if found and found[0].name == "unexplained factor":
            hidden = _hidden_clip(gradient, truth, observed.tolerance, shape.loss_scale)
            if isinstance(hidden, str):
                return (), hidden
            found = (hidden,) if hidden else found
        elif not found and self.reference.draws:
            found = (_RANDOM,)
        found = found or self._other_loss(window, observed, gradient)
        return found or (self._by_parameter(gradient, truth, shape, observed),), None

    def _other_loss(self, window: WindowRecord, observed: Observed, gradient: Tensor) -> tuple[Cause, ...]:
        """Whether the loop trains on something near the stated loss: labels shifted once more, or means of samples."""
        batches = [batch for record in window.ranks for batch in record.batches]
        shifted = [_shift_labels(batch) for batch in batches]
        rows = [_rows(batch) for batch in batches]
        if all(batch is not None for batch in shifted):
            total = self._sum_of([(batch, 1.0) for batch in shifted])
            if total is not None and _along(gradient, total) <= observed.tolerance:
                words = "the labels are shifted twice: by the data and by the model"
                mend = "give a model that shifts by itself (transformers' do) labels = input_ids"
                return (Cause("labels shifted twice", words, mend),)
        if all(rows):
            weighed = [(row, self._share(row)) for batch in rows for row in batch or ()]
            total = self._sum_of(weighed)
            if total is not None and _along(gradient, total) <= observed.tolerance:
                words = "mean of means: each sample's loss is divided by its own count, whatever the others hold"
                mend = "sum over the window's items and divide once; or, if it is meant so, count samples in count()"
                return (Cause("mean of means over samples", words, mend),)
        return ()

    def _share(self, row: Any) -> float:
        count = next(iter(self.reference.count(row).values()))
        return 1 / count if count else 0.0

    def _sum_of(self, weighed: Sequence[tuple[Any, float]]) -> Tensor | None:
        """A weighted sum of gradients; None where the loss cannot be computed of such batches."""
        total: Tensor | None = None
        try:
            for batch, weight in weighed:
                if weight:
                    names = self.reference.count(batch)
                    gradient = self.reference.gradient(batch, self.names, dict.fromkeys(names, weight))
                    total = gradient if total is None else total.add_(gradient)
        except MisuseError:
            return None
        return total

    def _by_parameter(self, gradient: Tensor, truth: Tensor, shape: Shape, observed: Observed) -> Cause:
        """The fault of some parameters, or of none that is known."""
        off, start = list[str](), 0
        for name, size in zip(self.names, self.reference.sizes(self.names), strict=True):
            mine, right = gradient[start : start + size], truth[start : start + size]
            start += size
            if float((mine - right).norm()) > observed.tolerance * float(right.norm() + truth.norm() * 1e-6):
                off.append(name)
        if len(off) < len(self.names):
            words = f"{len(off)} of {len(self.names)} parameters are off, and the others right: {shorten(off)}"
            mend = (
                "look for what these have alone: unused in a micro-step (find_unused_parameters=True), frozen, hooked"
            )
            return Cause("some parameters", words, mend)
        weights = torch.linalg.lstsq(observed.basis.T, observed.gradient.unsqueeze(1)).solution.squeeze(1) * shape.count
        left = float((observed.gradient - observed.basis.T @ weights / shape.count).norm() / observed.gradient.norm())
        if left <= observed.tolerance and len(weights) < observed.basis.shape[1]:
            words = ", ".join(
                f"rank {r} {s + 1}: {w:.3g}" for (r, s), w in zip(shape.where, weights.tolist(), strict=True)
            )
            mend = "give every item of the window the same weight: divide the summed loss once, by the window's count"
            return Cause("unequal weights", f"micro-batches weigh (1 is right) {words}", mend)
        words = "the gradient is no sum of these micro-batches' gradients, in whatever weights"
        mend = (
            "check that loss_sum is the loop's own loss (same labels, same shift, auxiliary losses), and that the "
            "forward does not draw random numbers"
        )
        return Cause("another loss", words, mend)


def _notes(window: WindowRecord, low: bool) -> list[str]:
    notes = []
    if low:
        notes.append(f"16 or fewer bits: errors below {LOW_TOLERANCE:.0%} cannot be told from rounding; audit in fp32")
    if len({record.weights_digest for record in window.ranks}) > 1:
        notes.append("the ranks' weights differ; compared with the gradient at rank 0's")
    reduced = [sum(map(bool, record.reduces)) for record in window.ranks]
    if any(count > 1 for count in reduced):
        notes.append(
            f"gradients are reduced {max(reduced)} times in the window, and once is enough: forward and backward of "
            "every micro-step but the last belong in no_sync()"
        )
    return notes


def _unclip(
    gradient: Tensor, clips: Sequence[Clip], steps: int, loss_scale: float | None
) -> tuple[Tensor, str | None, Cause | None]:
    """The gradient before a clip at the window's end, a note on that clip, and its fault."""
    final = [clip for clip in clips if clip.backwards == steps]
    if not final or not all(math.isfinite(clip.norm) for clip in final):
        return gradient, None, None
    (clip,) = final[-1:]
    whole = gradient / clip.coefficient
    norm = float(whole.norm())
    if abs(norm - clip.norm) <= 1e-2 * clip.norm:
        note = f"clipped from norm {clip.norm:.4g} to {clip.max_norm:g}; the figures are of the gradient before"
        return whole, note if clip.coefficient < 1 else None, None
    if loss_scale and loss_scale != 1 and abs(norm * loss_scale - clip.norm) <= 1e-2 * clip.norm:
        words = (
            f"the loss scale is not taken out before clipping: a norm of {clip.norm:.4g} = {loss_scale:g} x {norm:.4g} "
            f"was clipped to {clip.max_norm:g}, so that the step is {clip.coefficient:.2g} times the gradient"
        )
        return (
            whole,
            None,
            Cause("clipped before unscaling", words, "scaler.unscale_(optimizer) before clip_grad_norm_"),
        )
    return gradient, None, None


def _hidden_clip(gradient: Tensor, truth: Tensor, tolerance: float, loss_scale: float | None) -> str | Cause | None:
    """Of a gradient in the right direction whose norm is a round number: clipped where the audit does not see it.

    Returns:
        a note where the global batch's gradient would have been clipped to the same, else the cause.
    """
    if _along(gradient, truth) > tolerance:
        return None
    norm, right = float(gradient.norm()), float(truth.norm())
    for scale in (1.0, loss_scale or 1.0):
        rounded = float(f"{norm * scale:.2g}")
        if not rounded or abs(norm * scale - rounded) > _ROUND * rounded:
            continue
        if scale != 1:
            words = (
                f"the norm is {rounded:g} / {scale:g}, the loss scale: clipped, unseen, while the scale was still in"
            )
            return Cause("clipped before unscaling", words, "scaler.unscale_(optimizer) before clip_grad_norm_")
        if norm < right:
            return (
                f"clipped to norm {rounded:g}, unseen, as the right gradient would be; audit without, to see the factor"
            )
        words = (
            f"the direction is right and the norm is {rounded:g}, more than the right gradient's {right:.3g}: clipped"
        )
        return Cause("clipped", f"{words}, unseen, from more", "audit again without clipping, which hides the factor")
    return None


def _along(gradient: Tensor, direction: Tensor) -> float:
    """How far ``gradient`` is from a positive multiple of ``direction``, relatively."""
    across = float(gradient @ direction)
    if across <= 0:
        return math.inf
    return float((gradient - direction * (across / float(direction @ direction))).norm() / gradient.norm())


def _order(error: float) -> float:
    return math.inf if math.isnan(error) else error


def _samples(batch: Any) -> int:
    return next((len(tensor) for tensor in tensors_of(batch) if tensor.ndim), 1)


def _labels(batch: Any) -> Tensor | None:
    """``labels`` by name, else the last tensor of integers."""
    if isinstance(batch, Mapping) and isinstance(batch.get("labels"), Tensor):
        named: Tensor = batch["labels"]
        return named
    whole = [tensor for tensor in tensors_of(batch) if not tensor.is_floating_point() and tensor.ndim]
    return whole[-1] if whole else None


def _positions(batch: Any) -> int:
    labels = _labels(batch)
    return _samples(batch) if labels is None else labels.numel()


def _shift_labels(batch: Any) -> Any:
    """The batch with its labels ``(B, T)`` moved by one position; None where it has none."""
    labels = _labels(batch)
    if labels is None or labels.ndim != len(("row", "position")) or labels.is_floating_point():
        return None
    moved = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], dim=1)
    return map_tensors(batch, lambda tensor: moved if tensor is labels else tensor)


def _rows(batch: Any) -> list[Any] | None:
    """The batch's samples, each as a batch of one; None where its tensors do not agree on their number."""
    sizes = {len(tensor) if tensor.ndim else 0 for tensor in tensors_of(batch)}
    if len(sizes) != 1 or 0 in sizes:
        return None
    return [map_tensors(batch, itemgetter(slice(i, i + 1))) for i in range(sizes.pop())]
