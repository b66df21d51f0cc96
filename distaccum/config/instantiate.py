"""Instantiates nodes of the configuration that name a ``_target_``: finds it, checks the arguments, calls it."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Any, get_type_hints

from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate

from distaccum.config.checks import Node
from distaccum.config.extras import install_command
from distaccum.errors import ConfigError, near_misses

_EXTRAS = {"schedulefree": "optimizers", "bitsandbytes": "optimizers"}  # packages that files in conf/ name


def build(key: str, node: Node, *positional: Any, takes: type | None = None, **extra: Any) -> Any:
    """Calls the node's ``_target_`` with the rest of the node.

    Args:
        key: the node's dotted name, for error messages.
        node: ``_target_`` and keyword arguments.
        positional: arguments that go first.
        takes: what is made has to be one; a target that makes something else is not called.
        extra: further keyword arguments.

    Raises:
        ConfigError: no such target, one that makes no part of a run, an argument that it does not take or of another
            type than it declares, or an error that it raises itself.
    """
    check(key, node, takes=takes)
    try:
        return instantiate(node, *positional, **extra, _convert_="all")
    except InstantiationException as error:
        cause = error.__cause__
        if isinstance(cause, ConfigError):
            raise cause from None
        cause = cause or error
        remedy = "Correct its arguments"
        raise ConfigError(key, node["_target_"], f"{type(cause).__name__}: {cause}", remedy) from error


def check(key: str, node: Node, *, takes: type | None = None) -> Any:
    """The target of a node that is built later, looked at as :func:`build` does before it calls anything.

    Raises:
        ConfigError: as :func:`build`, but for what the target itself raises.
    """
    target = target_of(key, node)
    _refuse_others(key, node, target, takes)
    _check_within(key, node)
    _check_arguments(key, node, target)
    return target


def _check_within(key: str, node: Node) -> None:
    """Looks at the targets among the arguments, which are called, too."""
    for name, value in node.items():
        within = value if isinstance(value, list) else [value]
        for one in within:
            if isinstance(one, Mapping):
                if "_target_" in one:
                    _refuse_others(f"{key}.{name}", dict(one), target_of(f"{key}.{name}", dict(one)), None)
                _check_within(f"{key}.{name}", dict(one))


def _refuse_others(key: str, node: Node, target: Any, takes: type | None) -> None:
    """Refuses, before it is called, what makes no part of a run: it may do anything, as ``os.system`` does."""
    module = str(getattr(target, "__module__", None) or "")
    is_own = module.partition(".")[0] in sys.stdlib_module_names
    if module == "torch.serialization" or (is_own and (module == "subprocess" or not inspect.isclass(target))):
        remedy = "Name a class or function that makes a part of a run"
        raise ConfigError(f"{key}._target_", node["_target_"], "makes no part of a run, and is not called", remedy)
    made = target
    if takes is not None and not inspect.isclass(target):
        made = None
        with suppress(TypeError, ValueError, NameError, AttributeError):
            made = get_type_hints(target).get("return")
        if not inspect.isclass(made):  # it does not say what it returns
            made = None if module.partition(".")[0] in ("torch", "numpy") else takes
    if takes is not None and not (inspect.isclass(made) and issubclass(made, takes)):
        remedy = f"Name a class that inherits from {takes.__name__}, or a function that returns one"
        raise ConfigError(f"{key}._target_", node["_target_"], f"makes no {takes.__name__}, and is not called", remedy)


def target_of(key: str, node: Node) -> Any:
    """The class or function that the node names.

    Raises:
        ConfigError: there is no such thing.
    """
    if "_target_" not in node:
        remedy = "Name the class or function to call, as package.module.Name"
        raise ConfigError(f"{key}._target_", None, "is missing", remedy)
    target = node["_target_"]
    try:
        with _untold():
            return get_object(target)
    except (ImportError, ValueError, AttributeError) as error:
        remedy = "Give package.module.Name, importable from where you start the run (see PYTHONPATH)"
        package = str(target).partition(".")[0]
        if package in _EXTRAS and find_spec(package) is None:
            remedy = f"Run {install_command(_EXTRAS[package])}"
        raise ConfigError(f"{key}._target_", target, f"cannot be imported ({error})", remedy) from error


@contextmanager
def _untold() -> Iterator[None]:
    """Keeps Hydra from logging what it raises as well."""
    log = logging.getLogger("hydra.utils")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def signature_of(function: Any) -> Mapping[str, inspect.Parameter]:
    """The arguments that ``function`` takes by name; none where it does not tell."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def _check_arguments(key: str, node: Node, function: Any) -> None:
    """Refuses what a signature tells beforehand: unknown arguments, and plain numbers of the wrong type."""
    try:
        parameters = inspect.signature(function).parameters
        hints = get_type_hints(function.__init__ if inspect.isclass(function) else function)
    except (TypeError, ValueError, NameError):
        return  # a target without a readable signature checks its arguments itself
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for name, value in node.items():
        if name.startswith("_") and name.endswith("_"):
            continue
        if name not in parameters and not open_ended:
            remedy = f"It takes {', '.join(parameters)}"
            raise ConfigError(f"{key}.{name}", value, f"no such argument{near_misses(name, parameters)}", remedy)
        expected = hints.get(name)
        if expected in (int, float) and not _is_number(value, expected):
            raise ConfigError(f"{key}.{name}", value, f"not of type {expected.__name__}", "Give a number of that type")


def _is_number(value: Any, expected: type) -> bool:
    if isinstance(value, bool):
        return False
    return isinstance(value, int) or (expected is float and isinstance(value, float))
