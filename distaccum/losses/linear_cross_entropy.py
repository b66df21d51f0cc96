"""The output layer and its cross entropy in one, chunk by chunk: logits of all tokens are never in memory.

Of each chunk of tokens the logits are made, reduced to the loss and turned into their own gradient in place; what is
kept are the gradients of the hidden states and of the weight, so that the backward only scales them.

Source: P.-L. Hsu et al., "Liger Kernel: Efficient Triton Kernels for LLM Training" (2024), for the gradient in the
forward, chunk by chunk; E. Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models" (2024), for the bound
on memory. torch has it as ``linear_cross_entropy(options=...)`` from 2.13 on, without weights of tokens.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from distaccum.errors import MisuseError

CHUNK = 2048
_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}
_FLOATS = {bits: kind for kind, bits in _BITS.items()}
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
Tensors = tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]
"""Hidden ``(n, width)``, weight, bias, labels ``(n,)`` of which none is ignored, and a factor of each label's loss."""
Settings = tuple[torch.dtype, int, int]
"""What products are computed in, the rows that are classes, and the tokens of a chunk."""


@dataclass(frozen=True, eq=False)
class ChunkedOutput:
    """What a model calls in place of its output layer: ``output(hidden, weight, bias)`` gives the loss of ``labels``.

    A model that takes it has one more argument, ``forward(self, inputs, output=F.linear)``, and ends with
    ``return output(hidden, self.out.weight, self.out.bias)``. The output layer so stays inside the forward, where an
    engine that shards parameters has it whole. Where a vocabulary is padded, ``classes=n`` says that only the first n
    rows of the weight are classes.

    Args:
        labels: int64, of the shape of ``hidden`` without its last dimension.
        bits: the weights of labels, in their shape, from :meth:`of`; None: all are 1.
        ignore_index: labels of this value neither contribute nor count.
        chunk: the most tokens whose logits are in memory.
        scores: whether to count the right predictions too.
    """

    labels: Tensor
    bits: Tensor | None
    ignore_index: int
    chunk: int
    scores: bool

    @classmethod
    def of(
        cls,
        labels: Tensor,
        *,
        weights: Tensor | None = None,
        ignore_index: int = -100,
        chunk: int = CHUNK,
        scores: bool = False,
    ) -> ChunkedOutput:
        """Of ``weights`` it keeps the bits: engines cast floating-point inputs of a forward to 16 bits."""
        if weights is not None:
            wide = weights if weights.dtype in _BITS else weights.float()
            weights = wide.contiguous().view(_BITS[wide.dtype])
        return cls(labels, weights, ignore_index, chunk, scores)

    def __call__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None = None, *, classes: int | None = None
    ) -> Tensor:
        """The sum of the losses, 0-dim; with ``scores`` also the (weighted) right predictions, ``(2,)``."""
        weights = None if self.bits is None else self.bits.view(_FLOATS[self.bits.dtype])
        options: dict[str, Any] = {"ignore_index": self.ignore_index, "chunk": self.chunk, "classes": classes}
        if self.scores:
            return torch.stack(linear_scores(hidden, weight, self.labels, bias, weights=weights, **options))
        return linear_cross_entropy(hidden, weight, self.labels, bias, weights=weights, **options)


# Engines map over a forward's tensors, as they stand in lists and dictionaries: to keep, share and replay them.
pytree.register_pytree_node(
    ChunkedOutput,
    lambda one: ([one.labels, one.bits], (one.ignore_index, one.chunk, one.scores)),
    lambda tensors, settings: ChunkedOutput(*tensors, *settings),
    serialized_type_name="distaccum.losses.ChunkedOutput",
)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    weights: Tensor | None = None,
    ignore_index: int = -100,
    chunk: int = CHUNK,
    classes: int | None = None,
) -> Tensor:
    """The summed cross entropy of ``F.linear(hidden, weight, bias)`` in nats: 0-dim, at least fp32.

    Products are computed in the dtype that ``F.linear`` would have here, in autocast too; exponentials and sums in
    fp32, or in fp64 for fp64. A second backward of the same graph computes the gradient again.

    Args:
        hidden: ``(*labels.shape, width)``.
        weight: ``(rows, width)``.
        labels: int64; those of value ``ignore_index`` neither contribute nor count.
        bias: ``(rows,)``.
        weights: of the labels' losses, in the labels' shape; None: all are 1.
        ignore_index: as above.
        chunk: the most tokens whose logits are in memory.
        classes: the first rows that are classes; the rest is padding, of probability 0. None: all.

    Raises:
        MisuseError: the shapes do not fit.
    """
    tensors, settings = _parts(
        hidden, weight, labels, bias, weights=weights, ignore_index=ignore_index, chunk=chunk, classes=classes
    )
    with _no_autocast(hidden.device.type):
        if torch.is_grad_enabled():
            total: Tensor = _Chunked.apply(*tensors, *settings)  # type: ignore[no-untyped-call]
            return total
        return _forward(tensors, settings)[0]


@torch.no_grad()
def linear_scores(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    weights: Tensor | None = None,
    ignore_index: int = -100,
    chunk: int = CHUNK,
    classes: int | None = None,
) -> tuple[Tensor, Tensor]:
    """As :func:`linear_cross_entropy`, without a gradient; and the (weighted) number of right predictions."""
    tensors, settings = _parts(
        hidden, weight, labels, bias, weights=weights, ignore_index=ignore_index, chunk=chunk, classes=classes
    )
    with _no_autocast(hidden.device.type):
        return _forward(tensors, settings)


def _parts(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    *,
    weights: Tensor | None,
    ignore_index: int,
    chunk: int,
    classes: int | None,
) -> tuple[Tensors, Settings]:
    if hidden.shape[:-1] != labels.shape or hidden.shape[-1] != weight.shape[-1]:
        problem = f"hidden states of shape {list(hidden.shape)} for labels of shape {list(labels.shape)}"
        remedy = f"a hidden state of width {weight.shape[-1]}, that of the output weight, is wanted for each label"
        raise MisuseError(f"{problem}: {remedy}")
    kind = hidden.device.type
    casts = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    casts = casts and hidden.dtype is not torch.float64
    dtype = torch.get_autocast_dtype(kind) if casts else hidden.dtype
    counted = labels != ignore_index
    factors = counted.to(_wide(dtype))
    if weights is not None:
        factors = torch.where(counted, weights.to(factors.dtype), factors)
    flat = torch.where(counted, labels, 0).flatten()
    tensors = hidden.flatten(0, -2), weight, bias, flat, factors.flatten()
    return tensors, (dtype, len(weight) if classes is None else classes, chunk)


def _no_autocast(kind: str) -> AbstractContextManager[Any]:
    """Of the meta device, where operations are counted, torch knows no autocast."""
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


def _wide(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype is torch.float64 else torch.float32


def _shifted(hidden: Tensor, weight: Tensor, bias: Tensor | None, classes: int) -> Tensor:
    """The logits of a chunk minus the largest of each row: at least fp32, in memory of its own."""
    logits = F.linear(hidden, weight, bias)
    logits = logits.to(_wide(logits.dtype))
    if classes < logits.shape[1]:
        logits[:, classes:] = -torch.inf
    return logits.sub_(logits.amax(1, keepdim=True))


def _forward(tensors: Tensors, settings: Settings) -> tuple[Tensor, Tensor]:
    """The sums of losses and of right predictions."""
    (hidden, weight, bias, labels, factors), (dtype, classes, chunk) = tensors, settings
    hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    total, right = factors.new_zeros(2).unbind()
    for states, targets, share in _chunks(chunk, hidden, labels, factors):
        logits = _shifted(states, weight, bias, classes)
        right = right + ((logits.argmax(1) == targets) * share).sum()
        found = logits[:, :classes].gather(1, targets[:, None]).squeeze(1)  # a label of the padding is an error
        total = total + _weighed(logits.exp_().sum(1).log() - found, share).sum()
    return total, right


def _with_gradients(
    tensors: Tensors, settings: Settings, needed: tuple[bool, ...], scale: Tensor | None
) -> tuple[Tensor, Gradients]:
    """The sum, and its gradients by hidden, weight and bias, those that are ``needed``, times ``scale``."""
    (hidden, weight, bias, labels, factors), (dtype, classes, chunk) = tensors, settings
    hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    by_hidden = torch.empty_like(hidden) if needed[0] else None
    by_weight = torch.zeros_like(weight, dtype=_wide(dtype)) if needed[1] else None
    by_bias = torch.zeros_like(bias, dtype=_wide(dtype)) if bias is not None and needed[2] else None
    total, begin = factors.new_zeros(()), 0
    for states, targets, share in _chunks(chunk, hidden, labels, factors):
        logits = _shifted(states, weight, bias, classes)
        found = logits[:, :classes].gather(1, targets[:, None]).squeeze(1)  # a label of the padding is an error
        sums = logits.exp_().sum(1)
        total = total + _weighed(sums.log() - found, share).sum()
        weighed = share if scale is None else share * scale
        by_logits = logits.mul_((weighed / sums)[:, None])
        by_logits.scatter_add_(1, targets[:, None], -weighed[:, None])
        if by_bias is not None:
            by_bias += by_logits.sum(0)
        small = by_logits.to(dtype)
        if by_hidden is not None:
            torch.mm(small, weight, out=by_hidden[begin : begin + len(states)])
        if by_weight is not None:
            if by_weight.dtype is dtype:
                torch.addmm(by_weight, small.t(), states, out=by_weight)  # which torch counts, and addmm_ it does not
            else:
                by_weight += small.t() @ states
        begin += len(states)
    return total, (by_hidden, by_weight, by_bias)


def _chunks(chunk: int, *tensors: Tensor) -> Any:
    return zip(*(torch.split(tensor, chunk) for tensor in tensors), strict=True)


def _weighed(losses: Tensor, factors: Tensor) -> Tensor:
    """The losses times their factors; 0 where that is 0, whatever the loss, as ``F.cross_entropy`` has it."""
    return torch.where(factors == 0, 0.0, losses * factors)


class _Chunked(torch.autograd.Function):
    """The sum. In fp16 the gradient waits for the backward, which knows the loss scale: without it, most of it is 0."""

    walks_twice = True  # for the proof of a gradient, which walks a graph before the engine does

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        tensors, ctx.settings = arguments[:5], arguments[5:]
        ctx.save_for_backward(*tensors)
        ctx.made = None
        needed, (dtype, *_) = ctx.needs_input_grad[:3], ctx.settings
        if dtype is torch.float16 or not any(needed):
            return _forward(tensors, ctx.settings)[0]
        total, ctx.made = _with_gradients(tensors, ctx.settings, needed, None)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> Any:
        made, ctx.made = ctx.made, None  # changed in place below, so that they serve once
        tensors = ctx.saved_tensors
        if made is None:
            made = _with_gradients(tensors, ctx.settings, ctx.needs_input_grad[:3], scale)[1]
            scale = scale.new_ones(())
        return (*(_fitting(*pair, scale) for pair in zip(made, tensors, strict=False)), None, None, None, None, None)


def _fitting(gradient: Tensor | None, like: Tensor, scale: Tensor) -> Tensor | None:
    """``gradient`` times ``scale`` in the dtype of ``like``, multiplied in the wider of both: rounded once."""
    if gradient is None:
        return None
    return gradient.to(torch.promote_types(gradient.dtype, like.dtype)).mul_(scale).to(like.dtype)
