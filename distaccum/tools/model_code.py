"""A few letters for each source file that a model and a loss are written in, by which a change of one is seen."""

from __future__ import annotations

import ast
import hashlib
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FunctionType, ModuleType

_STANDARD = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
_INSTALLED = {"site-packages", "dist-packages"}
_OURS = "distaccum"
_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
_MOST = 200  # files that are read: a checkout of a library may have thousands


def code_of(things: Iterable[object]) -> dict[str, str]:
    """By module, the Python that has parsed it, and the digest of its syntax, in which there are no comments.

    Of the classes of ``things``, of what those inherit from, and of what their modules use that is written beside them.
    What is installed is known by its version, and what was typed into a prompt has no file.
    """
    todo = [name for one in things for name in _homes(one)]
    found = dict[str, str]()
    seen = set[str]()
    while todo and len(found) < _MOST:
        name = todo.pop()
        module = sys.modules.get(name)
        if name in seen or module is None:
            continue
        seen.add(name)
        if (digest := _digest(module)) is not None:
            found[name] = f"{_PYTHON} {digest}"
            used = () if _is_ours(name) else list(vars(module).values())
            todo += [home for value in used for home in _homes(value) if not _is_ours(home)]
    return found


def differing(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """The modules of which the same Python has parsed another syntax."""
    both = sorted(before.keys() & now.keys())
    return [name for name in both if before[name] != now[name] and before[name].split()[:1] == now[name].split()[:1]]


def _homes(value: object) -> Iterator[str]:
    """The names of the modules that something is written in: a module, a function, a class or an object of one."""
    if isinstance(value, ModuleType):
        yield value.__name__
        return
    kinds = (value,) if isinstance(value, FunctionType) else (value if isinstance(value, type) else type(value)).__mro__
    yield from (kind.__module__ for kind in kinds if isinstance(kind.__module__, str))


def _is_ours(name: str) -> bool:
    return name.partition(".")[0] == _OURS


def _digest(module: ModuleType) -> str | None:
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or not file.endswith(".py"):
        return None
    if _INSTALLED & {*Path(file).parts} or file.startswith(_STANDARD):
        return None
    with suppress(OSError, SyntaxError, ValueError, RecursionError):
        return hashlib.sha256(ast.dump(ast.parse(Path(file).read_bytes())).encode()).hexdigest()[:16]
    return None
