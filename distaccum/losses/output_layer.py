"""A model's own output layer, made to give the loss: for models whose forward is not ours to change.

The model is called with one more argument, which a hook on it takes away before its forward sees it. Until the forward
is over, hooks on its output layer (what ``get_output_embeddings`` names) give a :class:`ChunkedOutput`'s result in
place of logits. All of it happens inside the forward, where an engine that shards parameters has the weight whole, and
where one that replays a forward replays the loss. What the model does to its logits afterwards has to be nothing; that
is checked, by value once for each model, in its first batch that has a loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distaccum.errors import ConfigError, MisuseError
from distaccum.losses.linear_cross_entropy import ChunkedOutput

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


def find(model: nn.Module, chunk: int) -> tuple[nn.Module, nn.Linear]:
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


def call(model: nn.Module, inputs: Any, output: ChunkedOutput) -> Tensor:
    """Calls ``model(**inputs)``, whose output layer gives what ``output`` gives: 0-dim, or ``(2,)`` with scores.

    The first call of a model, and the next ones until the loss is neither 0 nor infinite, reads its result on the
    host, to see that the model passes it on as it is.

    Raises:
        ConfigError: as :func:`find`.
        MisuseError: the model does not call its output layer once, or changes what that gives.
    """
    place = next((module for module in model.modules() if _MODEL in module.__dict__), None)
    if place is None:
        place = _attach(*find(model, output.chunk))
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
