"""What functions keep from one call to the next: variables that they close over or name, and their objects."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from distaccum.tools.plain_state import PlainState

_NUMBERS = (bool, int, float, complex, str, type(None))


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
        self._plain = PlainState([_Holder(held), *(one for one in held if not isinstance(one, type))])

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
