"""The output layer and its cross entropy in one, chunk by chunk: logits of all tokens are never in memory.

Of each chunk of tokens the logits are made, reduced to the loss and turned into their own gradient in place; what is
kept are the gradients of the hidden states and of the weight, so that the backward only scales them.

Source: P.-L. Hsu et al., "Liger Kernel: Efficient Triton Kernels for LLM Training" (2024), for the gradient in the
forward, chunk by chunk; E. Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models" (2024), for the bound
on memory. torch has it as ``linear_cross_entropy(options=...)`` from 2.13 on, without weights of tokens.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from distaccum.errors import ConfigError, MisuseError

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
        return linear_cross_entropy(hidden, weight, self.labels, bias, weights=weights, scores=self.scores, **options)


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
    scores: bool = False,
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
        scores: gives the (weighted) number of right predictions as well, ``(2,)``, and no gradient.

    Raises:
        MisuseError: the shapes do not fit.
    """
    if hidden.shape[:-1] != labels.shape or hidden.shape[-1] != weight.shape[-1]:
        problem = f"hidden states of shape {list(hidden.shape)} for labels of shape {list(labels.shape)}"
        remedy = f"a hidden state of width {weight.shape[-1]}, that of the output weight, is wanted for each label"
        raise MisuseError(f"{problem}: {remedy}")
    kind = hidden.device.type
    knows = torch.amp.is_autocast_available(kind)  # not the meta device, where operations are counted
    casts = knows and torch.is_autocast_enabled(kind) and hidden.dtype is not torch.float64
    dtype = torch.get_autocast_dtype(kind) if casts else hidden.dtype
    counted = labels != ignore_index
    factors = counted.to(_wide(dtype))
    if weights is not None:
        factors = torch.where(counted, weights.to(factors.dtype), factors)
    flat = torch.where(counted, labels, 0).flatten()
    tensors = hidden.flatten(0, -2), weight, bias, flat, factors.flatten()
    settings = dtype, len(weight) if classes is None else classes, chunk
    with torch.autocast(kind, enabled=False) if knows else nullcontext():
        if torch.is_grad_enabled() and not scores:
            total: Tensor = _Chunked.apply(*tensors, *settings)  # type: ignore[no-untyped-call]
            return total
        with torch.no_grad():
            total, right = _forward(tensors, settings)
        return torch.stack((total, right)) if scores else total


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


# A model's own output layer, made to give the loss: for models whose forward is not ours to change.
#
# The model is called with one more argument, which a hook on it takes away before its forward sees it. Until the
# forward is over, hooks on its output layer (what ``get_output_embeddings`` names) give a :class:`ChunkedOutput`'s
# result in place of logits. All of it happens inside the forward, where an engine that shards parameters has the weight
# whole, and where one that replays a forward replays the loss. What the model does to its logits afterwards has to be
# nothing; that is checked, by value once for each model, in its first batch that has a loss.

ARGUMENT = "distaccum_output"
_MODEL, _HEAD = "_distaccum_call", "_distaccum_head_call"  # attributes of the two modules
# Settings of transformers' models that act on logits. Others than these are found by value.
_SETTINGS = (
    "final_logit_softcapping",
    "logits_soft_cap",
    "output_logit_soft_cap",
    "softcap",
    "logit_scale",
    "logits_scaling",
    "output_multiplier",
    "unpadded_vocab_size",
)


@dataclass
class _Call:
    """One forward of the model, while it lasts."""

    output: ChunkedOutput | None = None
    hidden: Tensor | None = None
    given: Tensor | None = None
    """In place of logits: their last dimension, the others of size 1; the results first, and then zeros."""
    checked: bool = False


def find_output_layer(model: nn.Module, chunk: int) -> tuple[nn.Module, nn.Linear]:
    """The module of ``model`` that has an output layer, and that layer.

    Raises:
        ConfigError: there is none, it is no plain linear layer, or the model is known to do more to its logits.
    """
    shown, remedy = type(model).__name__, "Leave the chunk out: the loss then takes whole logits"
    for module in model.modules():
        get = getattr(type(module), "get_output_embeddings", None)
        head = None if get is None else get(module)
        if head is None:
            continue
        if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward or "forward" in vars(head):
            problem = f"the output layer of {shown} is a {type(head).__name__}, and a plain torch.nn.Linear is wanted"
            raise ConfigError("loss.chunk", chunk, problem, remedy)
        config = getattr(module, "config", None)
        for part in (config, getattr(config, "text_config", None)):
            for name in _SETTINGS:
                value = getattr(part, name, None)
                if value not in (None, False, 1):
                    problem = f"{shown} changes its logits ({name}={value}), which a loss in chunks cannot see"
                    raise ConfigError("loss.chunk", chunk, problem, remedy)
        return module, head
    problem = f"{shown} has no get_output_embeddings(), which names its output layer"
    raise ConfigError("loss.chunk", chunk, problem, f"{remedy}; or give the model that method")


def call_output_layer(model: nn.Module, inputs: Any, output: ChunkedOutput) -> Tensor:
    """Calls ``model(**inputs)``, whose output layer gives what ``output`` gives: 0-dim, or ``(2,)`` with scores.

    The first call of a model, and the next ones until the loss is neither 0 nor infinite, reads its result on the
    host, to see that the model passes it on as it is.

    Raises:
        ConfigError: as :func:`find`.
        MisuseError: the model does not call its output layer once, or changes what that gives.
    """
    place = next((module for module in model.modules() if _MODEL in module.__dict__), None)
    if place is None:
        place = _attach(*find_output_layer(model, output.chunk))
    found: Any = model(**inputs, **{ARGUMENT: output})
    state: _Call = place.__dict__[_MODEL]
    given, state.given = state.given, None
    logits: Any = found.get("logits") if isinstance(found, dict) else getattr(found, "logits", None)
    logits = found[0] if logits is None and isinstance(found, tuple) else logits
    shown, remedy = type(model).__name__, "leave the chunk of the loss out, which then takes whole logits"
    if given is None:
        raise MisuseError(f"{shown} does not call the layer that its get_output_embeddings() names: {remedy}")
    same = isinstance(logits, Tensor) and logits.shape == given.shape
    if same and not state.checked and not given.is_meta:  # where operations are counted there are no values
        same = torch.allclose(logits.detach(), given.to(logits.dtype), rtol=0, atol=0, equal_nan=True)
        first = given.flatten()[0]  # the loss, of which a 0 or an infinity is what many changes leave as it is
        state.checked = bool(first.isfinite() & (first != 0))
    if not same:
        raise MisuseError(
            f"{shown} changes its logits, behind the output layer, which a loss in chunks cannot see: {remedy}"
        )
    flat: Tensor = logits.flatten()
    return flat[:2] if output.scores else flat[0]


def _attach(module: nn.Module, head: nn.Linear) -> nn.Module:
    """Places the hooks, for good: an engine that replays a forward calls the model by itself. They do nothing else."""
    module.__dict__[_MODEL] = head.__dict__[_HEAD] = _Call()
    module.register_forward_pre_hook(_begin, with_kwargs=True)
    module.register_forward_hook(_end, always_call=True)
    head.register_forward_pre_hook(_take)
    head.register_forward_hook(_give, prepend=True)  # before an engine frees the weight
    return module


def _begin(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    state: _Call = module.__dict__[_MODEL]
    state.output, state.hidden, state.given = kwargs.get(ARGUMENT), None, None
    # Another dictionary: an engine may keep the one that came, to call the model with it again.
    return args, {name: value for name, value in kwargs.items() if name != ARGUMENT}


def _end(module: nn.Module, _: Any, __: Any) -> None:
    state: _Call = module.__dict__[_MODEL]
    state.output = state.hidden = None


def _take(head: nn.Module, args: tuple[Tensor, ...]) -> Any:
    """Keeps the hidden states, and leaves the layer one token of them."""
    state: _Call = head.__dict__[_HEAD]
    if state.output is None:
        return None
    if state.hidden is not None:
        raise MisuseError("the model calls its output layer twice in a forward: leave the chunk of the loss out")
    (state.hidden,) = args
    return (state.hidden.flatten(0, -2)[:1].detach(),)


def _give(head: nn.Module, _: Any, __: Any) -> Tensor | None:
    state: _Call = head.__dict__[_HEAD]
    if state.output is None or state.hidden is None:
        return None
    weight: Any = head.weight
    made = state.output(state.hidden, weight, head.bias)  # type: ignore[arg-type]
    made = made.reshape(*[1] * (state.hidden.dim() - 1), -1)
    result = F.pad(made, (0, len(weight) - made.shape[-1]))  # no view: FSDP2 refuses those
    state.given = result.detach()
    return result
