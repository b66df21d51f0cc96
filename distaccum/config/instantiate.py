"""Instantiates nodes of the configuration that name a ``_target_``: finds it, checks the arguments, calls it."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, get_type_hints

from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate

from distaccum.config.checks import Node
from distaccum.config.extras import install_command
from distaccum.errors import ConfigError, near_misses

_EXTRAS = {"schedulefree": "optimizers", "bitsandbytes": "optimizers"}  # packages that files in conf/ name


def build(key: str, node: Node, *positional: Any, **extra: Any) -> Any:
    """Calls the node's ``_target_`` with the rest of the node.

    Args:
        key: the node's dotted name, for error messages.
        node: ``_target_`` and keyword arguments.
        positional: arguments that go first.
        extra: further keyword arguments.

    Raises:
        ConfigError: no such target, an argument that it does not take or of another type than it declares, or an
            error that it raises itself.
    """
    _check_arguments(key, node, target_of(key, node))
    try:
        return instantiate(node, *positional, **extra, _convert_="all")
    except InstantiationException as error:
        cause = error.__cause__
        if isinstance(cause, ConfigError):
            raise cause from None
        cause = cause or error
        remedy = "Correct its arguments"
        raise ConfigError(key, node["_target_"], f"{type(cause).__name__}: {cause}", remedy) from error


def check(key: str, node: Node) -> Any:
    """The target of a node that is built later, its arguments checked as :func:`build` checks them.

    Raises:
        ConfigError: no such target, or an argument that it does not take or of another type than it declares.
    """
    target = target_of(key, node)
    _check_arguments(key, node, target)
    return target


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
