"""The blocks of a model: what is sharded, compiled or computed again one by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from torch import nn

from distaccum.errors import ConfigError, near_misses


def blocks_of(model: nn.Module, globs: Sequence[str], *, key: str = "engine.blocks") -> list[nn.Module]:
    """The modules that the globs name; by default a transformer's layers, as it lists them.

    Those are of the classes in Hugging Face's ``_no_split_modules``, or else the elements of each outermost
    ``ModuleList``; but none that shares a parameter with what is outside of it, as tied embeddings do.

    ``key`` is the setting that the globs are of.

    Raises:
        ConfigError: a glob matches nothing.
    """
    modules = dict(model.named_modules())
    for glob in globs:
        if not any(fnmatchcase(name, glob) for name in modules):
            problem = f"matches no module of {type(model).__name__}{near_misses(glob, modules)}"
            raise ConfigError(key, glob, problem, "Use names as of model.named_modules()")
    if globs:
        chosen = [m for name, m in modules.items() if name and any(fnmatchcase(name, glob) for glob in globs)]
    else:
        unsplit = set(getattr(model, "_no_split_modules", None) or ())
        chosen = [module for module in modules.values() if type(module).__name__ in unsplit] or list(_listed(model))
        chosen = _sharing_nothing(model, chosen)
    # What a module holds comes before it: it is sharded first.
    once = dict.fromkeys(reversed(chosen))  # a layer may be used in several places
    return [module for module in once if any(p.requires_grad for p in module.parameters())]


def _sharing_nothing(model: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    places: dict[int, set[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            places.setdefault(id(parameter), set()).add(module)
    return [block for block in blocks if all(places[id(p)] <= set(block.modules()) for p in block.parameters())]


def _listed(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from child if isinstance(child, nn.ModuleList) else _listed(child)
