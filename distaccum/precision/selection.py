"""What a policy says of a model: which modules compute in what, and what cannot work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from distaccum.errors import ConfigError, near_misses, shorten
from distaccum.precision.policy import PrecisionPolicy

SIXTEEN_BIT = (torch.float16, torch.bfloat16)


def check_parameters(model: nn.Module) -> None:
    """What the optimizer steps must have fp32's resolution, whatever the forward computes in.

    Raises:
        ConfigError: a trainable parameter is float16 or bfloat16.
    """
    small = {name: p.dtype for name, p in model.named_parameters() if p.requires_grad and p.dtype in SIXTEEN_BIT}
    if small:
        dtype = next(iter(small.values()))
        shown = str(dtype).removeprefix("torch.")
        which = shorten(small, most=1)
        problem = f"trainable parameters are {shown} ({which}): small updates and sums of gradients round away"
        half = dtype is torch.float16
        same = f"precision={'fp16' if half else 'bf16'} computes in {shown} all the same, from fp32 weights"
        if not half:
            same += ", and precision=bf16-weights has the weights in bf16 beside fp32 masters"
        remedy = f"Load it in float32, as with dtype=torch.float32 or model.float(): {same}"
        raise ConfigError("model", type(model).__name__, problem, remedy)


def check_globs(model: nn.Module, policy: PrecisionPolicy) -> None:
    """Every glob of the policy has to match a module that is called, or one that holds such.

    Raises:
        ConfigError: one does not.
    """
    modules = _modules(model)
    for key, globs in (("precision.keep_fp32", policy.keep_fp32), ("precision.only", policy.only)):
        for glob in globs:
            matched = [module for name, module in modules.items() if fnmatchcase(name, glob)]
            if not matched:
                problem = f"matches no module of {type(model).__name__}{near_misses(glob, modules)}"
                outer = shorten([name for name, _ in model.named_children()], most=8)
                remedy = f"Use names as of model.named_modules(), which begin with {outer}; * matches any part"
                raise ConfigError(key, glob, problem, remedy)
            if all(_only_holds(part) for module in matched for part in module.modules()):
                kinds = shorten(sorted({type(module).__name__ for module in matched}))
                remedy = "Name the module that uses what it holds"
                raise ConfigError(key, glob, f"matches what is never called itself ({kinds})", remedy)


def check_compiled(model: nn.Module, policy: PrecisionPolicy) -> None:
    """What the globs name must not lie in what torch.compile was given: what that has traced runs past later hooks.

    A model that is compiled after ``apply_precision`` computes as the policy says: tracing leaves the hooks out.

    Raises:
        ConfigError: something does.
    """
    kept, only = select(model, policy)
    compiled: dict[nn.Module, str] = {}  # what lies inside, and in which one
    for name, module in _modules(model).items():
        in_place = module._compiled_call_impl is not None
        if in_place or "_orig_mod" in module._modules or _is_compiled(getattr(module, "forward", None)):
            inside = [part for part in module.modules() if in_place or part is not module]
            compiled = dict.fromkeys(inside, name) | compiled
    for key, placed in (("precision.keep_fp32", kept), ("precision.only", only)):
        for name, module in placed.items():
            if module in compiled:
                where = compiled[module] or "the model"
                problem = f"{where} is compiled already, and what is compiled runs past the setting"
                remedy = "Leave torch.compile out, or call model.compile() once the model is wrapped"
                raise ConfigError(key, name, problem, remedy)


def describe(model: nn.Module, policy: PrecisionPolicy) -> str:
    """What computes in what, and what gradients travel in if not in fp32: one line for people."""
    kept, only = select(model, policy)
    line = policy.name
    if policy.name == "tf32":
        line += " (matrix products and convolutions)"
    if only:
        line += f": {listed(only)}"
    if only or kept:
        line += f"; fp32: {', '.join([*([listed(kept)] if kept else []), *(['all else'] if only else [])])}"
    if policy.reduce_dtype is not torch.float32:
        line += f"; gradients reduced in {'fp16' if policy.reduce_dtype is torch.float16 else 'bf16'}"
    return line


def listed(names: Iterable[str]) -> str:
    """Modules' names for people, the first few of them."""
    return shorten(name or "the whole model" for name in names)


def _modules(model: nn.Module) -> dict[str, nn.Module]:
    """By every name that a module has: one that is used in two places can be named by either."""
    return dict(model.named_modules(remove_duplicate=False))


def select(model: nn.Module, policy: PrecisionPolicy) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    """The modules to keep in fp32, and those to cover alone: the topmost of each kind, and none twice."""
    if not policy.casts:
        return {}, {}
    modules = _modules(model)
    kept = _outermost(modules, policy.keep_fp32, above={})
    return kept, _outermost(modules, policy.only, above=kept)


def _outermost(
    modules: Mapping[str, nn.Module], globs: tuple[str, ...], above: Mapping[str, nn.Module]
) -> dict[str, nn.Module]:
    """Of the modules that match, those that lie neither inside another one nor inside one of ``above``."""
    found: dict[str, nn.Module] = {}
    seen = set(above.values())
    opened: set[str] = set()  # those that match, and stand for what they hold
    for name, module in modules.items():  # a module comes before those inside it
        outer = _parents(name)
        if module in seen or any(modules[parent] in seen for parent in outer):
            continue
        if (outer and outer[-1] in opened) or any(fnmatchcase(name, glob) for glob in globs):
            if _only_holds(module):
                opened.add(name)
            else:
                found[name] = module
                seen.add(module)
    return found


def _only_holds(module: nn.Module) -> bool:
    """Whether it has no forward, so that nobody calls it: ModuleList, ModuleDict, ParameterList and the like."""
    return getattr(type(module), "forward", None) is nn.Module.forward and "forward" not in vars(module)


def _is_compiled(forward: Any) -> bool:
    return hasattr(forward, "_torchdynamo_orig_callable") and not getattr(forward, "_torchdynamo_disable", False)


def _parents(name: str) -> list[str]:
    """The names of the modules that this one lies in, itself not included."""
    parts = name.split(".") if name else []
    return [".".join(parts[:depth]) for depth in range(len(parts))]
