"""Switches dropout off: with it neither of two computations of a gradient would be the other's."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn


def switch_off(model: nn.Module) -> tuple[list[str], Callable[[], None]]:
    """Sets every dropout probability of the modules to 0.

    Found are the floats that a module holds under a name with ``drop`` in it, and ``p`` of torch's dropout modules.
    ``torch.nn.functional.dropout`` with a number that stands in a ``forward`` is not.

    Returns:
        the names of the modules concerned, and what restores them.
    """
    changed: list[tuple[str, nn.Module, str, float]] = []
    for name, module in model.named_modules():
        own = isinstance(module, nn.modules.dropout._DropoutNd)
        for attribute, value in list(vars(module).items()):
            if isinstance(value, float) and value > 0 and ("drop" in attribute.lower() or (own and attribute == "p")):
                changed.append((name or type(module).__name__, module, attribute, value))
                setattr(module, attribute, 0.0)

    def restore() -> None:
        for _, module, attribute, value in changed:
            setattr(module, attribute, value)

    return list(dict.fromkeys(name for name, *_ in changed)), restore
