"""What functions keep from one call to the next: variables that they close over or name, and their objects."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any

from torch import nn

from distaccum.tools.plain_state import PlainState, is_of_a_library

_NUMBERS = (bool, int, float, complex, str, type(None))
_WRAPPING = ("torch.", "distaccum.", "deepspeed.")


class _Holder:
    """Values as attributes of an object."""

    def __init__(self, values: Iterable[object]) -> None:
        self.__dict__ = {f"value {i}": value for i, value in enumerate(values)}


class FunctionState:
    """Numbers, texts and containers that functions hold, as they are now. Not where an iterator stands.

    Args:
        functions: also methods, parts of functions (``functools.partial``) and objects that are called.
    """

    def __init__(self, functions: Iterable[Callable[..., Any]]) -> None:
        self._cells: list[tuple[Any, object]] = []
        self._globals: list[tuple[dict[str, Any], str, object]] = []
        held: list[object] = []
        left: list[Any] = list(functions)
        seen = set[int]()
        while left:
            function = left.pop()
            if id(function) in seen:
                continue
            seen.add(id(function))
            if isinstance(function, functools.partial):
                left += [function.func, *filter(callable, (*function.args, *function.keywords.values()))]
                held += [*function.args, *function.keywords.values()]
            elif hasattr(function, "__self__"):
                held.append(function.__self__)
                left += [function.__func__] if hasattr(function, "__func__") else []
            elif hasattr(function, "__code__"):
                cells = [(cell, cell.cell_contents) for cell in function.__closure__ or () if _is_full(cell)]
                self._cells += cells
                held += [value for _, value in cells] + list(function.__defaults__ or ())
                left += [value for _, value in cells if callable(value) and not isinstance(value, type)]
                named = [name for name in function.__code__.co_names if name in function.__globals__]
                values = [(function.__globals__, name, function.__globals__[name]) for name in named]
                self._globals += [one for one in values if isinstance(one[2], _NUMBERS)]
                held += [value for _, _, value in values if type(value) in (list, dict, set)]
            else:
                held.append(function)
        own = [one for one in held if not (isinstance(one, type | ModuleType) or is_of_a_library(one))]
        self._plain = PlainState([_Holder(held), *own])

    def restore(self) -> None:
        """Sets them to what they were."""
        self._plain.restore()
        for cell, value in self._cells:
            if cell.cell_contents is not value:
                cell.cell_contents = value
        for names, name, value in self._globals:
            names[name] = value


def _is_full(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # of a variable that has no value yet
        return False


class ProgramState:
    """What modules and other objects hold as plain attributes, and what their hooks and functions keep.

    Args:
        owners: modules, with the user's hooks on them and on their parameters; other objects, and functions.
    """

    def __init__(self, owners: Sequence[object]) -> None:
        self._plain = PlainState(owners)
        self._functions = FunctionState(_functions(owners))

    def changed(self) -> Iterator[str]:
        """The names of attributes that are no longer what they were; reads the device."""
        return self._plain.changed()

    def restore(self) -> None:
        """Sets everything to what it was; see :class:`PlainState`."""
        self._plain.restore()
        self._functions.restore()


def _functions(owners: Iterable[object]) -> Iterator[Callable[..., Any]]:
    for owner in owners:
        if isinstance(owner, nn.Module):
            kinds = [owner._forward_pre_hooks, owner._forward_hooks, owner._backward_pre_hooks, owner._backward_hooks]
            kinds += [parameter._backward_hooks or {} for parameter in owner.parameters(recurse=False)]
            yield from (hook for hooks in kinds for hook in hooks.values() if not _is_of_a_library(hook))
        elif callable(owner):
            yield owner


def _is_of_a_library(hook: Any) -> bool:
    """Whether it is torch's, an engine's or ours, of which nothing may be put back."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return str(getattr(hook, "__module__", "")).startswith(_WRAPPING)
