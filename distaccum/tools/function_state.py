"""What functions keep from one call to the next: variables that they close over or name, and their objects."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from distaccum.tools.plain_state import PlainState, is_of_a_library, is_same

_NUMBERS = (bool, int, float, complex, str, type(None))
_FUNCTIONS = (FunctionType, MethodType, functools.partial)
_WRAPPING = ("torch.", "distaccum.", "deepspeed.")


class _Holder:
    """Values as attributes of an object, by the names of their variables."""

    def __init__(self, values: Iterable[tuple[str, object]]) -> None:
        self.__dict__ = {}
        for name, value in values:
            self.__dict__[name if name not in self.__dict__ else f"{name} ({len(self.__dict__)})"] = value


class FunctionState:
    """Numbers, texts and containers that functions hold, as they are now. Not where an iterator stands.

    Args:
        functions: also methods, parts of functions (``functools.partial``) and objects that are called.
    """

    def __init__(self, functions: Iterable[Callable[..., Any]]) -> None:
        self._cells: list[tuple[str, Any, object]] = []
        self._globals: list[tuple[dict[str, Any], str, object]] = []
        held: list[tuple[str, object]] = []
        left: list[Any] = list(functions)
        seen = set[int]()
        while left:
            function = left.pop()
            if id(function) in seen:
                continue
            seen.add(id(function))
            if isinstance(function, functools.partial):
                left += [function.func, *filter(callable, (*function.args, *function.keywords.values()))]
                held += [*(("an argument", one) for one in function.args), *function.keywords.items()]
            elif hasattr(function, "__self__"):
                held.append(("self", function.__self__))
                left += _functions_of(function.__self__)
                left += [function.__func__] if hasattr(function, "__func__") else []
            elif hasattr(function, "__code__"):
                own = zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
                cells = [(name, cell, cell.cell_contents) for name, cell in own if _is_full(cell)]
                self._cells += cells
                held += [(name, value) for name, _, value in cells]
                held += [("a default", one) for one in function.__defaults__ or ()]
                left += [value for *_, value in cells if callable(value) and not isinstance(value, type)]
                named = [name for name in function.__code__.co_names if name in function.__globals__]
                values = [(function.__globals__, name, function.__globals__[name]) for name in named]
                self._globals += [one for one in values if isinstance(one[2], _NUMBERS)]
                held += [(name, value) for _, name, value in values if type(value) in (list, dict, set)]
            else:
                held.append(("an object", function))
                left += _functions_of(function)
        objects = [one for _, one in held if not (isinstance(one, type | ModuleType) or is_of_a_library(one))]
        self._plain = PlainState([_Holder(held), *objects])

    def changed(self) -> Iterator[str]:
        """The names of variables and attributes that are no longer what they were; reads the device."""
        yield from self._plain.changed()
        yield from (name for name, cell, value in self._cells if not is_same(cell.cell_contents, value))
        yield from (name for names, name, value in self._globals if not is_same(names[name], value))

    def restore(self) -> None:
        """Sets them to what they were."""
        self._plain.restore()
        for _, cell, value in self._cells:
            if cell.cell_contents is not value:
                cell.cell_contents = value
        for names, name, value in self._globals:
            names[name] = value


def _functions_of(value: object) -> list[Any]:
    """That an object of the user's keeps as attributes, such as a loss's criterion."""
    if is_of_a_library(value) or isinstance(value, nn.Module | type):
        return []
    return [one for one in getattr(value, "__dict__", {}).values() if isinstance(one, _FUNCTIONS)]


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
        """The names of attributes and variables that are no longer what they were; reads the device."""
        yield from self._plain.changed()
        yield from self._functions.changed()

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
