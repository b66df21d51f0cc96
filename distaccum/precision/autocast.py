"""``precision.keep_fp32`` and ``precision.only``: hooks on the modules they name."""

from __future__ import annotations

import warnings
from collections.abc import Callable, MutableMapping
from copy import copy
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from distaccum.errors import PrecisionWarning
from distaccum.precision.policy import PrecisionPolicy
from distaccum.precision.selection import SIXTEEN_BIT, listed, select

_Hook = TypeVar("_Hook", bound=Callable[..., Any])
_KEY, _AWAITED = "_distaccum_precision", "_distaccum_precision_awaited"


def apply_precision(model: nn.Module, policy: PrecisionPolicy, device: torch.device, *, warn: bool = True) -> None:
    """Makes the modules of ``model`` compute in what the policy says, in place of what an earlier call said.

    A module of ``keep_fp32`` switches autocast off while it runs, and takes its 16-bit tensors in fp32; one of
    ``only`` switches autocast on while it runs, and gives its 16-bit tensors in fp32. Modules inside follow, but for
    those of ``keep_fp32`` inside ``only``; a ModuleList and the like, which are never called, stand for what they hold.
    Call the model within ``policy.autocast``. After its first forward ``warn`` warns of what that did not call.
    """
    for module in model.modules():
        for attribute in (module.__dict__.pop(_KEY, None), module.__dict__.pop(_AWAITED, None)):
            for handle in attribute.handles if attribute else ():
                handle.remove()
    kept, only = select(model, policy)
    awaited = _PendingCheck()
    for key, globs, modules, dtype in (
        ("keep_fp32", policy.keep_fp32, kept, None),
        ("only", policy.only, only, policy.compute_dtype),
    ):
        placed = {name: _attach(module, _Hooked(device.type, dtype)) for name, module in modules.items()}
        awaited.settings[f"precision.{key}=[{','.join(globs)}]"] = placed
    if warn and (kept or only):
        awaited.handles.append(model.register_forward_hook(_tell_of_the_uncalled))
        model.__dict__[_AWAITED] = awaited


@dataclass
class _Hooked:
    """An attribute of the module that it is about. The hooks are functions that get the module, so a copy has its own.

    The calls in progress are a stack, for modules that call themselves.
    """

    device_type: str
    dtype: torch.dtype | None  # None: fp32
    handles: list[RemovableHandle] = field(default_factory=list)
    calls: list[tuple[bool, torch.dtype, bool]] = field(default_factory=list)  # the state before each
    called: bool = False


@dataclass
class _PendingCheck:
    """An attribute of the model, until its first forward has ended: what was placed by which setting, by name."""

    settings: dict[str, dict[str, _Hooked]] = field(default_factory=dict)
    handles: list[RemovableHandle] = field(default_factory=list)


def _attach(module: nn.Module, placed: _Hooked) -> _Hooked:
    """Ours are the outermost hooks: the first before the forward and the last after it, whatever the forward raises."""
    placed.handles += [
        module.register_forward_pre_hook(_enter, prepend=True, with_kwargs=True),
        module.register_forward_hook(_leave, with_kwargs=True, always_call=True),
    ]
    module.__dict__[_KEY] = placed  # where a compiled module is asked for it, setattr would give it to the one inside
    return placed


def _untraced(hook: _Hook) -> _Hook:
    """For torch.compile to leave out of its graphs: what a graph holds of such switches is their state when traced."""
    return cast(_Hook, torch.compiler.disable(hook))  # type: ignore[no-untyped-call]


# The state is set by hand, not by entering torch.autocast: that counts how deep it is nested, and after an interrupt
# between the hooks it would never again come to the outermost exit, where it forgets the casts of old weights.
@_untraced
def _enter(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    placed: _Hooked = module.__dict__[_KEY]
    placed.called = True
    kind = placed.device_type
    state = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()
    placed.calls.append(state)
    if placed.dtype is None:
        torch.set_autocast_enabled(kind, False)
        return _in_fp32(args), _in_fp32(kwargs)
    torch.set_autocast_enabled(kind, True)
    torch.set_autocast_dtype(kind, placed.dtype)
    if not _in_a_context():
        torch.set_autocast_cache_enabled(False)
    return None


@_untraced
def _leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    placed: _Hooked = module.__dict__[_KEY]
    if placed.calls:  # or a hook before ours has raised
        enabled, dtype, cache = placed.calls.pop()
        torch.set_autocast_enabled(placed.device_type, enabled)
        torch.set_autocast_dtype(placed.device_type, dtype)
        torch.set_autocast_cache_enabled(cache)
    return None if placed.dtype is None else _in_fp32(output)


@_untraced
def _tell_of_the_uncalled(model: nn.Module, args: Any, output: Any) -> None:
    """Hooks see calls alone: TransformerEncoderLayer, for one, reads the weights of its ``self_attn.out_proj``."""
    awaited: _PendingCheck | None = model.__dict__.pop(_AWAITED, None)
    if awaited is None:  # torch.compile calls hooks that it has met once, though they are removed
        return
    for handle in awaited.handles:
        handle.remove()
    for setting, placed in awaited.settings.items():
        uncalled = [name for name, one in placed.items() if not one.called]
        if uncalled:
            verb, those = ("was", "it") if len(uncalled) == 1 else ("were", "them")
            text = f"{verb} not called in the first forward, so the setting had no effect on {those}"
            warnings.warn(f"{setting}: {listed(uncalled)} {text}", PrecisionWarning, stacklevel=2)


def _in_a_context() -> bool:
    """Whether a torch.autocast is open, on or off: only the end of one clears the cache of casted weights."""
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return depth > 1


def _in_fp32(value: Any) -> Any:
    """``value`` with its 16-bit tensors in fp32, at any depth; the very same object where it holds none."""
    if isinstance(value, Tensor):
        return value.float() if value.dtype in SIXTEEN_BIT else value
    if isinstance(value, list | tuple):
        parts = [_in_fp32(part) for part in value]
        if all(new is old for new, old in zip(parts, value, strict=True)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, MutableMapping):  # before dataclasses: Hugging Face's outputs are both
        entries = {key: new for key, old in value.items() if (new := _in_fp32(old)) is not old}
        mapping = copy(value) if entries else value
        for key, new in entries.items():
            mapping[key] = new
        return mapping
    if is_dataclass(value) and not isinstance(value, type):
        old = {item.name: getattr(value, item.name, None) for item in fields(value)}
        changed = {name: new for name, part in old.items() if (new := _in_fp32(part)) is not part}
        made = copy(value) if changed else value
        for name, new in changed.items():
            object.__setattr__(made, name, new)  # frozen ones too
        return made
    return value
