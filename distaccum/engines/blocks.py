"""The blocks of a model: what is sharded, compiled or computed again one by one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn

from distaccum.errors import ConfigError, near_misses, shorten


def blocks_of(model: nn.Module, globs: Sequence[str], *, key: str = "engine.blocks") -> list[nn.Module]:
    """The modules that the globs name; by default a transformer's layers, as it lists them.

    Of a glob these are the outermost that it matches: ``layers.*`` names the layers, and nothing inside of them.
    Without one they are those of the classes in Hugging Face's ``_no_split_modules``, or else the elements of each
    outermost ``ModuleList`` that is not called ``experts``; but none that shares a parameter with what is outside of
    it, as tied embeddings do.

    Raises:
        ConfigError: a glob matches nothing; it names ``key``, the setting.
    """
    modules = dict(model.named_modules())
    if globs:
        found = {glob: set(_outermost(modules, glob)) for glob in globs}
        if nothing := next((glob for glob in globs if not found[glob]), ""):
            others = [name for name in modules if name not in ("", nothing)]
            alike = near_misses(nothing, others) or f", which has {shorten(others) or 'none'}"
            problem = f"matches no module of {type(model).__name__}{alike}"
            raise ConfigError(key, nothing, problem, "Use names as of model.named_modules(); of a list its elements'")
        chosen = [module for name, module in modules.items() if any(name in names for names in found.values())]
    else:
        unsplit = set(getattr(model, "_no_split_modules", None) or ())
        chosen = [module for module in modules.values() if type(module).__name__ in unsplit] or list(_listed(model))
        chosen = _sharing_nothing(model, chosen)
    once = dict.fromkeys(reversed(chosen))  # a layer may be used in several places
    trained = [module for module in once if any(p.requires_grad for p in module.parameters())]
    # What a module holds comes before it, and before all others that hold it too: it is sharded first.
    return sorted(trained, key=lambda module: len(list(module.modules())))


def _outermost(modules: Mapping[str, nn.Module], glob: str) -> Iterator[str]:
    """The names that the glob matches, but for what lies within such a module: a ``*`` matches dots too."""
    found = ""
    for name, module in modules.items():  # what a module holds comes right behind it
        has_forward = not isinstance(module, nn.ModuleList | nn.ModuleDict)
        if name and has_forward and not (found and name.startswith(f"{found}.")) and fnmatchcase(name, glob):
            found = name
            yield name


def _sharing_nothing(model: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    places: dict[int, set[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            places.setdefault(id(parameter), set()).add(module)
    return [block for block in blocks if all(places[id(p)] <= set(block.modules()) for p in block.parameters())]


def _listed(module: nn.Module) -> Iterator[nn.Module]:
    for name, child in module.named_children():
        if name != "experts":  # in parallel, of which the data choose: they belong to the block around them
            yield from child if isinstance(child, nn.ModuleList) else _listed(child)


def innermost(blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Those that hold no other of them: what happens between two blocks is not for a graph."""
    every = set(blocks)
    return [block for block in blocks if not any(module in every for module in block.modules() if module is not block)]
