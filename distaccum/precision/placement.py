"""Which modules compute in what: ``precision.keep_fp32`` and ``precision.only``, by hooks on the modules they name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from copy import copy
from dataclasses import dataclass, field, fields, is_dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from distaccum.errors import ConfigError, near_misses
from distaccum.precision.policy import PrecisionPolicy

_SIXTEEN_BIT = (torch.float16, torch.bfloat16)
_KEY = "_distaccum_precision"


def check_parameters(model: nn.Module) -> None:
    """What the optimizer steps must have fp32's resolution, whatever the forward computes in.

    Raises:
        ConfigError: a trainable parameter is float16.
    """
    half = [name for name, p in model.named_parameters() if p.requires_grad and p.dtype is torch.float16]
    if half:
        more = f" and {len(half) - 1} more" if len(half) > 1 else ""
        problem = f"trainable parameters are float16 ({half[0]}{more}), where small updates round to nothing"
        remedy = "Load it in float32, as with model.float(): precision=fp16 computes in float16 from fp32 weights"
        raise ConfigError("model", type(model).__name__, problem, remedy)


def check_globs(model: nn.Module, policy: PrecisionPolicy) -> None:
    """Every glob of the policy has to match a module.

    Raises:
        ConfigError: one does not.
    """
    names = list(_modules(model))
    for key, globs in (("precision.keep_fp32", policy.keep_fp32), ("precision.only", policy.only)):
        for glob in globs:
            if not any(fnmatchcase(name, glob) for name in names):
                problem = f"matches no module of {type(model).__name__}{near_misses(glob, names)}"
                outer = _listed([name for name, _ in model.named_children()], most=8)
                remedy = f"Use names as of model.named_modules(), which begin with {outer}; * matches any part"
                raise ConfigError(key, glob, problem, remedy)


def place(model: nn.Module, policy: PrecisionPolicy, device: torch.device) -> None:
    """Makes the modules of ``model`` compute in what the policy says, in place of what an earlier call said.

    A module of ``keep_fp32`` switches autocast off while it runs, and takes its 16-bit tensors in fp32; one of
    ``only`` switches autocast on while it runs, and gives its 16-bit tensors in fp32. Modules inside follow, but for
    those of ``keep_fp32`` inside ``only``. Call the model within ``policy.autocast``.
    """
    for module in model.modules():
        placed = module.__dict__.pop(_KEY, None)
        for handle in placed.handles if placed else ():
            handle.remove()
    kept, only = _placement(model, policy)
    for module in kept.values():
        _attach(module, _Placed(device.type, None))
    for module in only.values():
        _attach(module, _Placed(device.type, policy.compute_dtype))


def describe(model: nn.Module, policy: PrecisionPolicy) -> str:
    """What computes in what, and what gradients travel in if not in fp32: one line for people."""
    kept, only = _placement(model, policy)
    line = policy.name
    if policy.name == "tf32":
        line += " (matrix products and convolutions)"
    if only:
        line += f": {_listed(only)}"
    if only or kept:
        line += f"; fp32: {', '.join([*([_listed(kept)] if kept else []), *(['all else'] if only else [])])}"
    if policy.reduce_dtype is not torch.float32:
        line += f"; gradients reduced in {'fp16' if policy.reduce_dtype is torch.float16 else 'bf16'}"
    return line


def _listed(names: Iterable[str], most: int = 4) -> str:
    shown = [name or "the whole model" for name in names]
    more = len(shown) - most
    return ", ".join(shown) if more <= 0 else f"{', '.join(shown[:most])} and {more} more"


def _modules(model: nn.Module) -> dict[str, nn.Module]:
    """By every name that a module has: one that is used in two places can be named by either."""
    return dict(model.named_modules(remove_duplicate=False))


def _placement(model: nn.Module, policy: PrecisionPolicy) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    """The modules to keep in fp32, and those to cover alone: the topmost of each kind, and none twice."""
    if not policy.casts:
        return {}, {}
    modules = _modules(model)
    kept = _topmost(modules, policy.keep_fp32, above={})
    return kept, _topmost(modules, policy.only, above=kept)


def _topmost(
    modules: Mapping[str, nn.Module], globs: tuple[str, ...], above: Mapping[str, nn.Module]
) -> dict[str, nn.Module]:
    """Of the modules that match, those that lie neither inside another one nor inside one of ``above``."""
    found: dict[str, nn.Module] = {}
    seen = set(above.values())
    for name, module in modules.items():  # a module comes before those inside it
        inside = any(parent in found or parent in above for parent in _parents(name))
        if not inside and module not in seen and any(fnmatchcase(name, glob) for glob in globs):
            found[name] = module
            seen.add(module)
    return found


def _parents(name: str) -> list[str]:
    """The names of the modules that this one lies in, itself not included."""
    parts = name.split(".") if name else []
    return [".".join(parts[:depth]) for depth in range(len(parts))]


@dataclass
class _Placed:
    """An attribute of the module that it is about. The hooks are functions that get the module, so a copy has its own.

    The calls in progress are a stack, for modules that call themselves.
    """

    device_type: str
    dtype: torch.dtype | None  # None: fp32
    handles: list[RemovableHandle] = field(default_factory=list)
    calls: list[tuple[bool, torch.dtype, bool]] = field(default_factory=list)  # the state before each


def _attach(module: nn.Module, placed: _Placed) -> None:
    """Ours are the outermost hooks: the first before the forward and the last after it, whatever the forward raises."""
    placed.handles += [
        module.register_forward_pre_hook(_enter, prepend=True, with_kwargs=True),
        module.register_forward_hook(_leave, with_kwargs=True, always_call=True),
    ]
    setattr(module, _KEY, placed)


# The state is set by hand, not by entering torch.autocast: that counts how deep it is nested, and after an interrupt
# between the hooks it would never again come to the outermost exit, where it forgets the casts of old weights.
def _enter(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    placed: _Placed = module.__dict__[_KEY]
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


def _leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    placed: _Placed = module.__dict__[_KEY]
    if placed.calls:  # or a hook before ours has raised
        enabled, dtype, cache = placed.calls.pop()
        torch.set_autocast_enabled(placed.device_type, enabled)
        torch.set_autocast_dtype(placed.device_type, dtype)
        torch.set_autocast_cache_enabled(cache)
    return None if placed.dtype is None else _in_fp32(output)


def _in_a_context() -> bool:
    """Whether a torch.autocast is open, on or off: only the end of one clears the cache of casted weights."""
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return depth > 1


def _in_fp32(value: Any) -> Any:
    """``value`` with its 16-bit tensors in fp32, at any depth; the very same object where it holds none."""
    if isinstance(value, Tensor):
        return value.float() if value.dtype in _SIXTEEN_BIT else value
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
