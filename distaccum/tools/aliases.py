"""Tensors of a model that share memory with its weights, where an engine trains the weights in other memory."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from distaccum.engines.base import Engine
from distaccum.engines.modules import clean, to_local
from distaccum.errors import ConfigError, shorten

_OF_A_MODULE = frozenset(vars(nn.Module()))


class Aliases:
    """Attributes, buffers and parameters that overlap a parameter in memory, before the model is wrapped.

    Args:
        model: not wrapped yet, on any device.

    Raises:
        ConfigError: elements of a buffer share memory, so that nothing can be written to it, as ranks and loads do.
    """

    def __init__(self, model: nn.Module) -> None:
        expanded = [name for name, buffer in model.named_buffers() if _is_expanded(buffer)]
        if expanded:
            problem = f"elements of its buffers {shorten(expanded)} share memory (expand())"
            raise ConfigError(
                "model", type(model).__name__, problem, "Register them as tensor.expand(...).contiguous()"
            )
        by_storage = dict[int, list[tuple[str, nn.Parameter]]]()
        for name, parameter in model.named_parameters():
            by_storage.setdefault(_storage(parameter), []).append((clean(name), parameter))
        by_storage.pop(0, None)  # what has no memory
        self._found = [
            (name, of)
            for name, tensor in _held(model).items()
            for of, parameter in by_storage.get(_storage(tensor), [])
            if name != of and _overlap(tensor, parameter)
        ]

    def expect_kept(self, engine: Engine) -> None:
        """Closes the engine and raises ConfigError where one of them does not overlap its parameter any longer."""
        model = engine.unwrapped_model
        now = _held(model) if self._found else {}
        lost = [(name, of) for name, of in self._found if name in now and not _overlap(now[name], now[of])]
        if not lost:
            return
        engine.close()
        names, weights = (shorten(list(dict.fromkeys(each))) for each in zip(*lost, strict=True))
        problem = f"memory is shared by {names} and {weights}, and weights are trained in other memory here"
        remedy = "Read the parameter itself in the forward (.detach() for no gradient), or use engine=ddp in fp32"
        raise ConfigError("model", type(model).__name__.removeprefix("FSDP"), problem, remedy)


def _held(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, buffers, and plain attributes that are tensors or hold some; not those that hooks compute anew."""
    found = dict(model.named_buffers())
    for prefix, module in model.named_modules():
        anew = {
            getattr(hook, key, "") for hook in module._forward_pre_hooks.values() for key in ("name", "_tensor_name")
        }
        for key, value in vars(module).items():
            if key in anew or key in _OF_A_MODULE:
                continue
            pairs = (
                value.items()
                if isinstance(value, dict)
                else enumerate(value if isinstance(value, list | tuple) else ())
            )
            for place, one in [("", value), *((f"[{place!r}]", one) for place, one in pairs)]:
                if isinstance(one, Tensor):
                    found[f"{prefix}.{key}{place}" if prefix else f"{key}{place}"] = one
    found |= dict(model.named_parameters(remove_duplicate=False))
    return {clean(name): tensor for name, tensor in found.items()}


def _place(tensor: Any) -> tuple[int, int] | None:
    """The first address, and the one behind the last; None of what has no memory."""
    if tensor.layout is torch.strided and not tensor.is_meta and tensor.numel():
        with suppress(RuntimeError, NotImplementedError):
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
    return None


def _is_expanded(tensor: Tensor) -> bool:
    pairs = zip(tensor.shape, tensor.stride(), strict=True) if tensor.layout is torch.strided else ()
    return any(size > 1 and not stride for size, stride in pairs)


def _storage(tensor: Tensor) -> int:
    with suppress(RuntimeError, NotImplementedError):
        return tensor.untyped_storage().data_ptr()
    return 0


def _overlap(a: Tensor, b: Tensor) -> bool:
    one, other = _place(to_local(a)), _place(to_local(b))
    return a is b or bool(one and other and one[0] < other[1] and other[0] < one[1])
